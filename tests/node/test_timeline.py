"""A node's timeline shows the stages of a pipeline at different chunks at the same moment."""

import json

import pytest

from base.kv_layout import KvPart
from base.messages import PrefillTimes
from engine.rank_group import GroupShape
from engine.step import StepPlan
from node.timeline import NodeTimeline, StageSteps, Timeline
from tests.manual_clock import ManualClock

PLAN = StepPlan((), 0)


def spans_of(timeline):
    """Return (stage, step, start, end) of each span, in the order in which they ended."""
    events = timeline.events()
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [
        (names[event["tid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


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


def test_a_stage_begins_with_a_step_when_it_is_free_and_the_stage_before_has_ended_it():
    clock, timeline = ManualClock(), Timeline("node")
    zero_s = clock.now_s()
    steps = StageSteps(GroupShape(stages=3), timeline, clock)
    steps.ran(0, 1)
    steps.ran(0, 2)
    # Rank 1 is stage 0, rank 2 stage 1; the last stage tells of no step, its steps land.
    for event in (
        lambda: steps.ran(1, 1),
        lambda: (steps.ran(2, 1), steps.ran(1, 2)),
        lambda: (steps.landed(PLAN, 1.0, clock.now_s()), steps.ran(2, 2)),
        lambda: steps.landed(PLAN, 1.0, clock.now_s()),
    ):
        clock.advance(1.0)
        event()
    found = [(stage, step, start - zero_s, end - zero_s) for stage, step, start, end in spans_of(timeline)]
    assert found == [
        ("stage 0", "step 1", 0, 1),
        ("stage 1", "step 1", 1, 2),
        ("stage 0", "step 2", 1, 2),
        ("stage 2", "step 1", 2, 3),
        ("stage 1", "step 2", 2, 3),
        ("stage 2", "step 2", 3, 4),
    ]


def test_an_engine_of_one_rank_has_one_stage():
    clock, timeline = ManualClock(), Timeline("node")
    steps = StageSteps(GroupShape(), timeline, clock)
    ended_at_s = clock.now_s() + 4.0
    clock.advance(5.0)
    steps.landed(PLAN, 2.0, ended_at_s)
    ((stage, step, start, end),) = spans_of(timeline)
    assert (stage, step, end - start) == ("stage 0", "step 1", 2.0)
    assert end == pytest.approx(ended_at_s), "it lands a while after it has ended"


def test_writes_and_the_parts_of_a_request_are_on_tracks_of_their_own(tmp_path):
    clock = ManualClock()
    timeline = NodeTimeline("node", clock)
    begun_at_s = clock.now_s()
    clock.advance(2.0)
    timeline.wrote(KvPart(0, 4, 2, 2), 3, begun_at_s)
    timeline.prefilled("r", PrefillTimes(0.25, 1.0, 0.5, exposed_load_s=0.25))
    timeline.write(tmp_path / "node.json")
    events = json.loads((tmp_path / "node.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"transfer of layer 0 on, head 2 on", "request r"}
    took_s = {event["name"]: event["dur"] / 1e6 for event in events if event["ph"] == "X"}
    assert took_s == {"write": 2.0, "transfer": 0.5, "compute": 1.0, "queue": 0.0, "load": 0.25}
