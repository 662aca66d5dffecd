"""A prefix whose layers are still coming while the step that reads them runs.

The event loop moves KV into the cache layer by layer and says so here; the device thread waits,
before it launches a layer, for that layer's part alone. So loading takes no longer than what computing
leaves uncovered. Where a step cannot wait inside, it waits for all before it begins.

A part for each layer would keep the interpreter busier than it is with launching layers. So there are parts
of several; small ones first, because nothing computes before the first is there, and small ones last,
because nothing is loaded any more while what they hold up is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

from base.clock import Clock
from engine.step import StepPlan


def prefix_parts(num_layers: int) -> tuple[int, ...]:
    """Return in which parts, each of so many layers, a prefix of `num_layers` comes."""
    first: list[int] = []
    size, left = 1, num_layers
    while left >= 2 * size:
        first.append(size)
        left -= 2 * size
        size = len(first)
    return (*first, *([left] if left else []), *reversed(first))


class Arrivals:
    """One prefix's. The event loop tells; the device thread waits."""

    def __init__(self, parts: Sequence[int], clock: Clock) -> None:
        """Begin with nothing there. `parts`: layers of each."""
        self._ends = tuple(accumulate(parts))
        self._num_layers_there = 0
        self._clock = clock
        self._changed = threading.Condition()
        self.waited_s = 0.0
        """For which the device thread was held up."""

    def arrived(self, num_parts: int) -> None:
        """So many leading parts are in the cache; the count never falls."""
        with self._changed:
            self._num_layers_there = max(self._num_layers_there, self._ends[num_parts - 1])
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more comes, whether all is there or not: what is computed now is dropped if not."""
        self.arrived(len(self._ends))

    def wait(self, num_layers: int) -> None:
        """Block until so many leading layers are there."""
        with self._changed:
            if self._num_layers_there >= num_layers:
                return
            began_s = self._clock.now_s()
            self._changed.wait_for(lambda: self._num_layers_there >= num_layers)
            self.waited_s += self._clock.now_s() - began_s

    def wait_for_all(self) -> None:
        self.wait(self._ends[-1])


def arrivals_of(plan: StepPlan) -> list[Arrivals]:
    """Return what a step has to wait for."""
    return [entry.sequence.arrivals for entry in plan.entries if entry.sequence.arrivals is not None]


def wait_for_prefixes(plan: StepPlan) -> None:
    """Block until every prefix of a step is there."""
    for arrivals in arrivals_of(plan):
        arrivals.wait_for_all()
