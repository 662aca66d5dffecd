"""A timeline is a file of complete events, one track for each thing that is done."""

import json

from base.timeline import Timeline


def test_spans_are_complete_events_on_named_tracks(tmp_path):
    timeline = Timeline("prefill-0")
    timeline.span("stage 1", "step 1", 2.0, 2.5, r1=64)
    timeline.span("stage 0", "step 1", 1.0, 2.0)
    timeline.write(tmp_path / "made" / "t.json")
    events = json.loads((tmp_path / "made" / "t.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [
        (names[event["tid"]], event["name"], event["ts"], event["dur"], event["args"])
        for event in events
        if event["ph"] == "X"
    ]
    assert spans == [
        ("stage 1", "step 1", 2e6, 0.5e6, {"r1": 64}),
        ("stage 0", "step 1", 1e6, 1e6, {}),
    ]
    assert events[0]["args"] == {"name": "prefill-0"}
