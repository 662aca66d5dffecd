"""The timeline of a node: its requests, its pipeline's stages and its transfers.

Rank 0 keeps it alone: it is notified when a stage has run a step, and a stage begins with a step
when it has ended the one before and the stage before has ended this one. So there is one
clock and nothing to merge; what a stage's answer takes through the pipe is in it.

Spans lie on tracks: a stage, the transfers of a rank, a request. They are kept in memory, `MAX_SPANS` at
most, and written once, for Chrome's tracing page and Perfetto: a node that is asked for a timeline runs a
measurement, and not for days.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from base.clock import Clock
from base.kv_layout import KvPart
from base.messages import PrefillTimes
from base.request import RequestId
from engine.build import Engine
from engine.rank_group import GroupShape
from engine.step import StepPlan
from prefill_node.sender import PrefillObserver

MAX_SPANS = 200_000
"""Some 60 MB; what comes after is not kept."""


class Timeline:
    """Owns the spans of one process. Any thread may add one.

    Args:
        process: What the process is called.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def span(self, track: str, name: str, start_s: float, end_s: float, **details: Any) -> None:
        """Keep what was done on `track` between two moments of the process's clock."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append((track, name, start_s, end_s, details))

    def events(self) -> list[dict[str, Any]]:
        """Return the spans in the Trace Event Format: complete events, in microseconds."""
        tracks = {track: number for number, track in enumerate(sorted({span[0] for span in self._spans}), 1)}
        named = [
            ("process_name", 0, self._process),
            *(("thread_name", tracks[name], name) for name in tracks),
        ]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": {"name": name}}
            for kind, tid, name in named
        ]
        for track, name, start_s, end_s, details in self._spans:
            times = {"ts": start_s * 1e6, "dur": max(end_s - start_s, 0.0) * 1e6}
            events.append({"ph": "X", "pid": 1, "tid": tracks[track], "name": name, **times, "args": details})
        return events

    def write(self, path: Path) -> None:
        """Write a file that chrome://tracing and ui.perfetto.dev open; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))


class NodeTimeline(PrefillObserver):
    """Owns a node's timeline while it is filled."""

    def __init__(self, node_id: str, clock: Clock) -> None:
        self._timeline = Timeline(node_id)
        self._clock = clock

    def watch(self, engine: Engine) -> None:
        """Keep what the engine's steps do, stage by stage."""
        shape = engine.ranks.shape if engine.ranks is not None else GroupShape()
        steps = StageSteps(shape, self._timeline, self._clock)
        if engine.ranks is not None:
            engine.ranks.on_step(steps.ran)
        engine.loop.on_step(steps.landed)

    def wrote(self, part: KvPart, num_blocks: int, begun_at_s: float) -> None:
        track = f"transfer of layer {part.first_layer} on, head {part.first_head} on"
        self._timeline.span(track, "write", begun_at_s, self._clock.now_s(), blocks=num_blocks)

    def prefilled(self, request_id: RequestId, times: PrefillTimes) -> None:
        end_s = self._clock.now_s()
        track = f"request {request_id}"
        parts = (
            ("transfer", times.exposed_transfer_s),
            ("compute", times.compute_s),
            ("queue", times.queue_s - times.exposed_load_s),
            ("load", times.exposed_load_s),
        )
        for name, seconds in parts:
            self._timeline.span(track, name, end_s - seconds, end_s, bubble_s=times.bubble_s)
            end_s -= seconds

    def write(self, path: Path) -> None:
        self._timeline.write(path)


class StageSteps:
    """Turns ends of steps into spans on a track for each stage."""

    def __init__(self, shape: GroupShape, timeline: Timeline, clock: Clock) -> None:
        self._shape = shape
        self._timeline = timeline
        self._clock = clock
        self._ended_s = [0.0] * shape.stages
        """When each stage ended with its last step."""
        self._reached_s: dict[int, float] = {}
        """When each step that is under way left the stage it was in."""
        self._num_landed = 0

    def ran(self, rank: int, step: int) -> None:
        """Note that a rank has run a step; rank 0: that it was sent to all."""
        if rank == 0:
            self._reached_s[step] = self._clock.now_s()
            return
        stage, place = self._shape.place(rank)
        if place == 0:
            self._end(stage, step, self._clock.now_s(), {})

    def landed(self, plan: StepPlan, seconds: float, ended_at_s: float) -> None:
        """Note that a step has ended in the last stage."""
        self._num_landed += 1
        if self._num_landed not in self._reached_s:
            self._reached_s[self._num_landed] = ended_at_s - seconds
        requests = {entry.sequence.request_id: entry.num_tokens for entry in plan.entries}
        self._end(self._shape.stages - 1, self._num_landed, ended_at_s, requests)
        del self._reached_s[self._num_landed]

    def _end(self, stage: int, step: int, ended_at_s: float, requests: dict[RequestId, int]) -> None:
        began_s = max(self._ended_s[stage], self._reached_s.get(step, ended_at_s))
        self._ended_s[stage] = ended_at_s
        if step in self._reached_s:
            self._reached_s[step] = ended_at_s
        self._timeline.span(f"stage {stage}", f"step {step}", began_s, ended_at_s, **requests)
