"""The parser of one answer: text in, in any pieces; reasoning, text and calls out.

All is read from text alone, so the state is a function of the tokens so far: it is the same after a
hand-off, a preemption, or a node that died. A call is handed on when it is whole: until then it may turn out
to be text, and one that a limit cut off is none. Of a demanded call alone (`forced.py`) arguments are handed
on as they come: a grammar holds the model to them, so nothing can take them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conductor.api.parsing.events import Called, Calling, Emit, Event, Said, Schemas, Thought
from conductor.api.parsing.feed import Feed, Marks, Steps

Reader = Callable[[Feed, Schemas, Emit], Steps[str | None]]
"""Reads calls after the mark that opens them, and hands each to `emit` when it is whole.

Returns the text that turned out to be no call; None where there is none.
"""


@dataclass(frozen=True)
class Form:
    """How the models of a family write reasoning and calls."""

    calls: Mapping[str, Reader]
    """The reader of calls for each mark that opens some."""
    think: tuple[str, str] | None = None
    """The marks around reasoning."""
    bare: tuple[str, Reader] | None = None
    """The first character of an answer that may be calls without a mark, and what reads them."""
    dropped: tuple[str, ...] = ()
    """Marks that are left out of the text."""
    inner: tuple[str, ...] = ()
    """Marks that only stand within calls."""
    stop_thinking: str = ""
    """Text that makes a model stop thinking, where its budget for that is spent."""
    ends_thinking: tuple[str, ...] = ()
    """Marks that end reasoning which was not closed."""
    keeps_space: bool = False
    """Whether white space before a call is text."""
    run: Callable[[Feed, Schemas, Emit, bool], Steps[None]] | None = None
    """The reader of answers that have another shape than text with marks in it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark."""
        return (*self.calls, *(self.think or ()), *self.dropped, *self.inner)


class AnswerParser:
    """The parser of one answer. Owned by whoever pushes."""

    def __init__(self, form: Form, schemas: Schemas, is_thinking: bool = False) -> None:
        """Begin. `is_thinking`: whether the prompt ends within reasoning."""
        self._feed = Feed()
        self._events: list[Event] = []
        self._run = (form.run or _Tagged(form).run)(self._feed, schemas, self._events.append, is_thinking)
        self._is_done = False

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._feed.is_thinking

    def push(self, text: str) -> list[Event]:
        """Return what `text` makes certain."""
        self._feed.text += text
        return self._go_on()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """Return what was waited for. `is_cut`: the answer ended at its limit of tokens."""
        self._feed.is_ended = True
        self._feed.is_cut = is_cut
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if not self._is_done:
            try:
                next(self._run)
            except StopIteration:
                self._is_done = True
        events = joined(self._events)
        self._events.clear()
        return events


def joined(events: list[Event]) -> list[Event]:
    """Return `events` with neighbours of one kind as one, and no empty text."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Calling | Called):
            found.append(event)
        elif isinstance(last, type(event)):
            found[-1] = event._replace(text=last.text + event.text)
        elif event.text:
            found.append(event)
    return found


@dataclass
class Trimmed:
    """Text without the white space at its ends; what may be the end waits."""

    emit: Callable[[str], None]
    has_begun: bool = False
    _space: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            kept = "".join(self._space) + kept if self.has_begun else kept.lstrip()
            self.has_begun = True
            self._space.clear()
            self.emit(kept)
        if len(text.rstrip()) < len(text):
            self._space.append(text[len(text.rstrip()) :])

    def end(self, keeps_space: bool = False) -> None:
        """End the text; the white space at its end is part of it or not."""
        if keeps_space and self.has_begun and self._space:
            self.emit("".join(self._space))
        self._space.clear()


class _Tagged:
    """Reads text with marks in it."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._think_begin, think_end = form.think or ("", "")
        self._in_thought = Marks(think_end, *form.ends_thinking) if form.think else None
        self._in_text = Marks(*form.calls, *form.dropped)

    def run(self, feed: Feed, schemas: Schemas, emit: Emit, is_thinking: bool) -> Steps[None]:
        form = self._form
        said = Trimmed(lambda text: emit(Said(text)))
        thought = Trimmed(lambda text: emit(Thought(text)))
        num_calls = 0

        def count(event: Event) -> None:
            nonlocal num_calls
            num_calls += 1
            emit(event)

        mark = ""
        may_think = True
        while True:
            if may_think and not mark:
                mark, is_thinking = yield from self._begin(feed, thought, is_thinking)
            if not mark and form.bare and not num_calls and not said.has_begun:
                space = yield from feed.space()
                if feed.text.startswith(form.bare[0]):
                    broken = yield from form.bare[1](feed, schemas, count)
                    if broken is not None and not self._goes_on(feed, said, broken):
                        return
                else:
                    said.add(space)
            mark = mark or (yield from feed.until(self._in_text, said.add))
            if not mark:
                said.end(keeps_space=form.keeps_space or not num_calls)
                return
            if (read := form.calls.get(mark)) is not None:
                said.end(form.keeps_space)
                broken = yield from read(feed, schemas, count)
                if broken is not None and not self._goes_on(feed, said, mark + broken):
                    return
            may_think, mark = form.think is not None and not said.has_begun, ""

    def _begin(self, feed: Feed, thought: Trimmed, is_thinking: bool) -> Steps[tuple[str, bool]]:
        """Read reasoning, if that is what comes; returns the call's mark that ended it."""
        if self._in_thought is None:
            return "", False
        if not is_thinking:
            space = yield from feed.space()
            if not (yield from feed.begins(self._think_begin)):
                feed.text = space + feed.text
                return "", False
        else:
            space = yield from feed.space()
            yield from feed.begins(self._think_begin)
        feed.is_thinking = True
        mark = yield from feed.until(self._in_thought, thought.add)
        feed.is_thinking = False
        thought.end(keeps_space=feed.is_cut)
        return (mark if mark in self._form.calls else ""), False

    def _goes_on(self, feed: Feed, said: Trimmed, broken: str) -> bool:
        """Handle what was no call: it is text, unless the answer was cut off in it."""
        if not feed.is_ended:
            said.add(broken)
            return True
        if not feed.is_cut:
            said.add(broken + feed.take(len(feed.text)))
            said.end(keeps_space=True)
        return False
