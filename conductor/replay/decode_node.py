"""A simulated decode node, in closed form between changes of its batch.

While the same B sequences decode, the context K grows by B a step and the step time is
linear in K, so k steps take

    T(k) = k A + d k (k - 1) / 2,   A = step(B, K),   d = step(B, K + B) - A

and nothing has to be simulated but the moments when the batch changes: a join (solve a
quadratic for the step it must wait for), a finish (the top of a heap), and KV running
out. About four events a request instead of one a token.

A run of k such steps is a segment. A sequence's token gaps are exactly the
segments between its join and its end, so the mean of its longest tenth comes out of a
handful of triples.

KV that does not fit: a sequence waits to join until it does; where growth overruns the
capacity the newest sequence is preempted, keeps its KV in host memory, and waits first in
line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import ceil, sqrt
from typing import Generic, TypeVar

from conductor.cost_model import CostModel
from conductor.replay.outcome import Segment

# Segments kept for sequences that ended are dropped when so many have gathered.
TRIM_AT = 4096

S = TypeVar("S")


class Sequence(Generic[S]):
    """One request's decoding on one node."""

    __slots__ = (
        "context_tokens",
        "finish_step",
        "first_segment",
        "gaps",
        "joined_at_s",
        "number",
        "owner",
        "started_at_s",
        "steps_left",
    )

    def __init__(self, owner: S, context_tokens: int, steps_left: int, token_at_s: float) -> None:
        """`steps_left` tokens are still to come after the one of `token_at_s`."""
        self.owner = owner
        self.context_tokens = context_tokens
        self.steps_left = steps_left
        self.started_at_s = token_at_s
        self.gaps: list[Segment] = []
        self.joined_at_s = 0.0
        self.first_segment = 0
        self.finish_step = 0
        self.number = 0


Schedule = Callable[..., None]
"""(moment, what to call, its arguments...)."""


class DecodeNode(Generic[S]):
    """Continuous batching on one node. `on_finish(sequence, now_s)` is told of each end."""

    def __init__(
        self,
        cost: CostModel,
        capacity_tokens: int,
        schedule: Schedule,
        on_finish: Callable[[Sequence[S], float], None],
    ) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_preemptions = 0
        self.busy_s = 0.0
        self._cost = cost
        self._token_s = cost.profile.decode_context_token_s
        self._schedule = schedule
        self._on_finish = on_finish
        self._running: list[tuple[int, int, Sequence[S]]] = []
        self._waiting: deque[Sequence[S]] = deque()
        self._batch = 0
        self._context_tokens = 0
        # the present segment: when it began, its first step and growth in seconds
        self._started_at_s = 0.0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._step = 0
        self._number = 0
        self._version = 0
        self._segments: list[Segment] = []
        self._dropped_segments = 0

    @property
    def batch(self) -> int:
        """Sequences decoding."""
        return self._batch

    @property
    def context_tokens(self) -> int:
        """Tokens of KV of the batch when its present segment began."""
        return self._context_tokens

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for KV blocks."""
        return len(self._waiting)

    def join(self, sequence: Sequence[S], now_s: float) -> None:
        """Let a sequence decode from the next step on, or wait until its KV fits."""
        self._close_at(now_s)
        if self._waiting or not self._enter(sequence):
            self._waiting.append(sequence)
            self._admit()
        self._plan()

    def evict_all(self, now_s: float) -> list[Sequence[S]]:
        """Return and forget every sequence: the node died. Its last whole step counts."""
        self._close_at(now_s)
        everyone = [entry[2] for entry in sorted(self._running, key=lambda entry: entry[:2])]
        for sequence in everyone:
            self._leave(sequence)
        everyone.extend(self._waiting)
        self._waiting.clear()
        self._running.clear()
        self._version += 1
        return everyone

    def _close_at(self, now_s: float) -> None:
        """End the segment at the first step boundary that is not before `now_s`."""
        elapsed_s = now_s - self._started_at_s
        if elapsed_s <= 0:
            return
        if not self._batch:
            self._started_at_s = now_s
            return
        growth_s = self._growth_s
        linear = self._first_s - growth_s / 2
        steps = 2 * elapsed_s / (linear + sqrt(linear * linear + 2 * growth_s * elapsed_s))
        self._close(ceil(steps - 1e-9))

    def _close(self, steps: int) -> None:
        if steps:
            first_s, growth_s = self._first_s, self._growth_s
            grown_s = growth_s * (steps - 1)
            seconds = steps * (first_s + grown_s / 2)
            self._segments.append((first_s + grown_s, steps, growth_s))
            self._step += steps
            self._started_at_s += seconds
            self.busy_s += seconds
            self._context_tokens += steps * self._batch

    def _enter(self, sequence: Sequence[S]) -> bool:
        """Let a sequence join if its KV fits; an empty batch takes any."""
        batch, context_tokens = self._batch, self._context_tokens + sequence.context_tokens
        if batch and context_tokens + batch >= self.capacity_tokens:
            return False
        self._batch = batch + 1
        self._context_tokens = context_tokens
        self._number = number = self._number + 1
        sequence.number = number
        sequence.finish_step = finish_step = self._step + sequence.steps_left
        sequence.joined_at_s = self._started_at_s
        sequence.first_segment = self._dropped_segments + len(self._segments)
        heappush(self._running, (finish_step, number, sequence))
        return True

    def _admit(self) -> None:
        """Let those waiting join, first come first served, as far as KV goes."""
        waiting = self._waiting
        while waiting and self._enter(waiting[0]):
            waiting.popleft()

    def _plan(self) -> None:
        """Schedule the next moment that the batch changes by itself."""
        self._version = version = self._version + 1
        batch = self._batch
        if not batch:
            return
        context_tokens = self._context_tokens
        steps = self._running[0][0] - self._step
        if context_tokens + steps * batch > self.capacity_tokens and batch > 1:
            steps = max(0, (self.capacity_tokens - context_tokens) // batch)
        self._first_s = first_s = self._cost.decode_step_s(batch, context_tokens)
        self._growth_s = growth_s = self._token_s * batch
        at_s = self._started_at_s + steps * (first_s + growth_s * (steps - 1) / 2)
        self._schedule(at_s, self._reach, version, steps, at_s)

    def _reach(self, version: int, steps: int, now_s: float) -> None:
        if version != self._version:
            return
        self._close(steps)
        self._started_at_s = now_s
        finished: list[Sequence[S]] = []
        running, step = self._running, self._step
        while running and running[0][0] <= step:
            sequence = heappop(running)[2]
            self._leave(sequence)
            finished.append(sequence)
        if not finished and self._batch > 1 and self._context_tokens + self._batch > self.capacity_tokens:
            self._preempt_newest()
        elif self._waiting:
            self._admit()
        self._plan()
        if len(self._segments) >= TRIM_AT:
            self._trim()
        for sequence in finished:
            self._on_finish(sequence, now_s)

    def _leave(self, sequence: Sequence[S]) -> None:
        """Take a sequence out of the batch and note its gaps so far."""
        gaps = self._segments[sequence.first_segment - self._dropped_segments :]
        steps_left = sequence.finish_step - self._step
        steps = sequence.steps_left - steps_left
        if gaps:
            # its first gap began with its last token, before it could join
            last_s, count, growth_s = gaps[0]
            first_s = last_s - growth_s * (count - 1)
            gaps[0] = (sequence.joined_at_s - sequence.started_at_s + first_s, 1, 0.0)
            if count > 1:
                gaps.append((last_s, count - 1, growth_s))
            sequence.gaps += gaps
            sequence.started_at_s = self._started_at_s
        sequence.steps_left = steps_left
        self._context_tokens -= sequence.context_tokens + steps
        sequence.context_tokens += steps
        self._batch -= 1

    def _preempt_newest(self) -> None:
        newest = max(self._running, key=_joined)
        self._running.remove(newest)
        heapify(self._running)
        self._leave(newest[2])
        self._waiting.appendleft(newest[2])
        self.num_preemptions += 1

    def _trim(self) -> None:
        """Forget the segments of sequences that ended."""
        oldest = min((entry[2].first_segment for entry in self._running), default=None)
        end = self._dropped_segments + len(self._segments) if oldest is None else oldest
        del self._segments[: end - self._dropped_segments]
        self._dropped_segments = end


def _joined(entry: tuple[int, int, Sequence[S]]) -> int:
    return entry[1]
