"""How long a simulated batch can wait for a step, as `engine/decode_slack.py` has it of sequences.

In a simulated engine every step gives each of the batch one token. So the moment when a sequence's next token
is due by its bound on the mean gap,

    first token + kept (gaps so far + 1)  =  (first token + kept (1 - step at its first token)) + kept step

is a line in the number of the step, and among sequences of one bound the first of them stays the first: a
heap for each bound has it at its top.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from base.step_budget import KEPT_LONGEST, KEPT_MEAN, is_lost, longest_left_s, target_gap_s
from conductor.replay.sim_request import SimRequest


class BatchSlack:
    """The bounds of the sequences of one batch."""

    def __init__(self) -> None:
        self._heaps: dict[float, list[tuple[float, int, SimRequest]]] = {}
        """Heaps of (due at step 0, number of its join, sequence), by bound on the mean gap."""
        self._longest: dict[float, int] = {}
        """How many of the batch have each bound on the longest gap."""
        self._num_unbounded = 0
        """How many of the batch name no bound, or have lost their only one."""
        self._joined: list[SimRequest] = []
        """Sequences that join in this step and have a bound on the longest gap."""
        self._new: list[tuple[float, int, SimRequest]] = []
        """Entries for the heaps, of those whose first token came with the last step."""

    def joined(self, request: SimRequest, step: int, is_new: bool) -> None:
        """Count a sequence that is in the batch from the step after so many on.

        `is_new`: it had its first token when the last step ended, whenever that was to be.
        """
        bounds = request.gap_bounds
        if bounds.longest_s != inf:
            self._longest[bounds.longest_s] = self._longest.get(bounds.longest_s, 0) + 1
            self._joined.append(request)
        if bounds.mean_s == inf or request.is_mean_lost:
            self._num_unbounded += bounds.longest_s == inf
            return
        first_step = step - (request.tokens_left - 1 - request.steps_left)
        due_s = request.prefilled_at_s + KEPT_MEAN * bounds.mean_s * (1 - first_step)
        entry = due_s, request.join_number, request
        if is_new:
            self._new.append(entry)
        else:
            heappush(self._heaps.setdefault(bounds.mean_s, []), entry)

    def left(self, request: SimRequest) -> None:
        """Let a sequence go; its place in a heap stays until it comes up."""
        bounds = request.gap_bounds
        if bounds.longest_s != inf:
            self._longest[bounds.longest_s] -= 1
            if not self._longest[bounds.longest_s]:
                del self._longest[bounds.longest_s]
        elif bounds.mean_s == inf or request.is_mean_lost:
            self._num_unbounded -= 1

    def stepped(self) -> None:
        """Note that those who joined have had a step."""
        self._joined.clear()
        for entry in self._new:
            heappush(self._heaps.setdefault(entry[2].gap_bounds.mean_s, []), entry)
        self._new.clear()

    def left_s(
        self, step: int, empty_s: float, now_s: float, waiting: Iterable[SimRequest]
    ) -> tuple[float, float, float]:
        """Return mean_left_s, longest_left_s and saving_s of `DecodeLoad`, after so many steps.

        `waiting`: those who decode as soon as there is place for them.
        """
        mean_left_s, saving_s = inf, 0.0
        while (found := self._first_due(step, now_s, waiting)) is not None:
            due_s, mean_s, request = found
            steps_left = request.finish_step - step if request.join_number else request.steps_left
            if not is_lost(due_s - now_s, max(1, steps_left), mean_s, empty_s):
                mean_left_s, saving_s = due_s - now_s, KEPT_MEAN * mean_s - empty_s
                break
            request.is_mean_lost = True
            if request.join_number:
                self._num_unbounded += request.gap_bounds.longest_s == inf
        longest_s = min((KEPT_LONGEST * each for each in self._longest if each >= empty_s), default=inf)
        if self._num_unbounded or any(each < empty_s for each in self._longest):
            longest_s = min(longest_s, target_gap_s(empty_s))
        for each in (*self._joined, *waiting):
            left_s = longest_left_s(each.gap_bounds, each.is_mean_lost, each.token_at_s, empty_s, now_s)
            longest_s = min(longest_s, left_s)
        return mean_left_s, longest_s, saving_s

    def _first_due(
        self, step: int, now_s: float, waiting: Iterable[SimRequest]
    ) -> tuple[float, float, SimRequest] | None:
        """Return when the first token after `step` is due, by which bound, and whose it is."""
        best: tuple[float, float, SimRequest] | None = None
        for mean_s, heap in list(self._heaps.items()):
            while heap and (heap[0][2].join_number != heap[0][1] or heap[0][2].is_mean_lost):
                heappop(heap)
            if not heap:
                del self._heaps[mean_s]
            else:
                due_s = heap[0][0] + KEPT_MEAN * mean_s * step
                if best is None or due_s < best[0]:
                    best = (due_s, mean_s, heap[0][2])
        for _, join_number, request in self._new:
            mean_s = request.gap_bounds.mean_s
            due_s = now_s + KEPT_MEAN * mean_s
            counts = join_number == request.join_number and not request.is_mean_lost
            if counts and (best is None or due_s < best[0]):
                best = (due_s, mean_s, request)
        for request in waiting:
            mean_s = request.gap_bounds.mean_s
            if mean_s != inf and not request.is_mean_lost:
                num_gaps = request.tokens_left - 1 - request.steps_left
                due_s = request.prefilled_at_s + KEPT_MEAN * mean_s * (num_gaps + 1)
                if best is None or due_s < best[0]:
                    best = (due_s, mean_s, request)
        return best
