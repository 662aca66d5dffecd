"""A prefix whose layers are still coming while the step that reads them runs.

The event loop moves KV into the cache layer by layer and reports it here; the device thread waits, before it
launches a layer, for that layer's part alone, so that loading goes on beside computing. A step that cannot
wait inside waits for all layers before it begins.

A part for each layer would keep the interpreter busier than launching the layers does, so a part has several.
Parts are small at the start, because nothing computes before the first is there, and small at the end,
because nothing is loaded any more while the last is computed.

In a pipeline every rank loads its own layers and waits for them itself. A load is named by its first block,
which no other load has meanwhile: a step names the loads that it reads, and each rank knows how far each of
its own has come (`ArrivingBlocks`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

from base.clock import Clock


def prefix_parts(num_layers: int) -> tuple[int, ...]:
    """Return the parts in which a prefix of `num_layers` comes, as the number of layers of each."""
    first: list[int] = []
    size, left = 1, num_layers
    while left >= 2 * size:
        first.append(size)
        left -= 2 * size
        size = len(first)
    return (*first, *([left] if left else []), *reversed(first))


class PrefixArrivals:
    """How far the load of one prefix has come. The event loop reports; the device thread waits."""

    def __init__(self, parts: Sequence[int], clock: Clock, first_block: int) -> None:
        """Begin a load, named by its first block, in `parts` of so many layers; nothing is there."""
        self.first_block = first_block
        self._ends = tuple(accumulate(parts))
        self._num_layers_there = 0
        self._clock = clock
        self._changed = threading.Condition()
        self.waited_s = 0.0
        """Seconds that the device thread was held up."""

    def arrived(self, num_parts: int) -> None:
        """Report that so many leading parts are in the cache; the count never falls."""
        with self._changed:
            self._num_layers_there = max(self._num_layers_there, self._ends[num_parts - 1])
            self._changed.notify_all()

    def end(self) -> None:
        """Report that nothing more comes. If something is missing, what is computed now is dropped."""
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
    """The loads into the cache of a rank that is not the first. Any thread."""

    def __init__(self, parts: Sequence[int], clock: Clock) -> None:
        """Begin without loads; each comes in `parts`, of so many of this rank's layers."""
        self._parts = tuple(parts)
        self._clock = clock
        self._loads: dict[int, PrefixArrivals] = {}

    def begin(self, first_block: int) -> None:
        """Have every step that names this load from now on wait for it."""
        self._loads[first_block] = PrefixArrivals(self._parts, self._clock, first_block)

    def arrived(self, first_block: int, num_parts: int) -> None:
        """Report that so many leading parts of a load are in the cache."""
        self._loads[first_block].arrived(num_parts)

    def end(self, first_block: int) -> None:
        """Report that nothing more of a load comes. Whether all is there, the first rank knows."""
        self._loads.pop(first_block).end()

    def of(self, first_blocks: Sequence[int]) -> list[PrefixArrivals]:
        """Return those of the named loads that have not ended."""
        loads = map(self._loads.get, first_blocks)
        return [arrivals for arrivals in loads if arrivals is not None]
