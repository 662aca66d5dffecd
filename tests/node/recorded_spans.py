"""A tracer that keeps what it was told, and its spans' names as a tree."""


class RecordedSpan:
    def __init__(self, name, parent, told, number):
        self.name = name
        self.parent = parent
        self.told = told
        self.traceparent = f"span-{number}"
        self.events = []
        self.ended = None

    def event(self, name, **told):
        self.events.append((name, told))

    def end(self, error="", **told):
        assert self.ended is None, f"{self.name} ended twice"
        self.ended = error
        self.told = {**self.told, **told}


class RecordedTracer:
    def __init__(self):
        self.spans = []
        self.past_spans = []

    def begin(self, name, parent, **told):
        self.spans.append(RecordedSpan(name, parent, told, len(self.spans)))
        return self.spans[-1]

    def past(self, name, parent, began_ago_s, ended_ago_s):
        assert began_ago_s >= ended_ago_s >= 0
        self.past_spans.append((name, parent, began_ago_s - ended_ago_s))

    def close(self):
        pass

    @property
    def open(self):
        return [span.name for span in self.spans if span.ended is None]

    def one(self, name):
        [span] = [span for span in self.spans if span.name == name]
        return span
