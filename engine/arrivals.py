"""A prefix whose layers are still coming while the step that reads them runs.

The event loop moves KV into the cache layer by layer and says so here; the device thread waits,
before it launches a layer, for that layer's part alone. So loading takes no longer than what computing
leaves uncovered. Where a step cannot wait inside, it waits for all before it begins.
"""

from __future__ import annotations

import threading

from base.clock import Clock
from engine.step import StepPlan


class Arrivals:
    """One prefix's. The event loop tells; the device thread waits."""

    def __init__(self, num_parts: int, clock: Clock) -> None:
        """Begin with nothing there. `num_parts`: of equally many layers."""
        self._num_parts = num_parts
        self._num_there = 0
        self._clock = clock
        self._changed = threading.Condition()
        self.waited_s = 0.0
        """For which the device thread was held up."""

    def arrived(self, num_parts: int) -> None:
        """So many leading parts are in the cache; the count never falls."""
        with self._changed:
            self._num_there = max(self._num_there, num_parts)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing more comes, whether all is there or not: what is computed now is dropped if not."""
        self.arrived(self._num_parts)

    def wait(self, layer: int, num_layers: int) -> None:
        """Block until that layer of `num_layers` is there."""
        wanted = -(-(layer + 1) * self._num_parts // num_layers)
        with self._changed:
            if self._num_there >= wanted:
                return
            began_s = self._clock.now_s()
            self._changed.wait_for(lambda: self._num_there >= wanted)
            self.waited_s += self._clock.now_s() - began_s


def arrivals_of(plan: StepPlan) -> list[Arrivals]:
    """Return what a step has to wait for."""
    return [entry.sequence.arrivals for entry in plan.entries if entry.sequence.arrivals is not None]


def wait_for_prefixes(plan: StepPlan) -> None:
    """Block until every prefix of a step is there."""
    for arrivals in arrivals_of(plan):
        arrivals.wait(0, 1)
