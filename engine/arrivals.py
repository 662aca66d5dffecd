"""A prefix whose layers are still coming while the step that reads them runs.

The event loop moves KV into the cache layer by layer and says so here; the device thread waits,
before it launches a layer, for that layer's part alone. So loading takes no longer than what computing
leaves uncovered. Where a step cannot wait inside, it waits for all before it begins.

A part for each layer would keep the interpreter busier than it is with launching layers. So there are parts
of several; small ones first, because nothing computes before the first is there, and small ones last,
because nothing is loaded any more while what they hold up is computed.

Of a pipeline every rank loads its own layers and waits for them itself. A load is named by the first
of its blocks, which no other load has meanwhile: a step names the loads that it reads, and
each rank knows how far each of its own has come (`ArrivingBlocks`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

from base.clock import Clock


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

    def __init__(self, parts: Sequence[int], clock: Clock, first_block: int) -> None:
        """Begin with nothing there.

        Args:
            parts: Layers of each.
            first_block: Of those that are loaded.
        """
        self.first_block = first_block
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


class ArrivingBlocks:
    """What is being loaded into the cache of a rank that is not the first. Any thread.

    Args:
        parts: Layers of each, of this rank's.
    """

    def __init__(self, parts: Sequence[int], clock: Clock) -> None:
        self._parts = tuple(parts)
        self._clock = clock
        self._loads: dict[int, Arrivals] = {}

    def begin(self, first_block: int) -> None:
        """From here on a step that names this load waits for it."""
        self._loads[first_block] = Arrivals(self._parts, self._clock, first_block)

    def arrived(self, first_block: int, num_parts: int) -> None:
        """So many leading parts are in the cache."""
        self._loads[first_block].arrived(num_parts)

    def end(self, first_block: int) -> None:
        """Nothing more comes, whether all is there or not: the first rank knows."""
        self._loads.pop(first_block).end()

    def of(self, first_blocks: Sequence[int]) -> list[Arrivals]:
        """Return what is to be waited for of these loads: those that have not ended."""
        loads = map(self._loads.get, first_blocks)
        return [arrivals for arrivals in loads if arrivals is not None]
