"""Block cache: the blocks in one simulated node's host memory, least recently used out first.

A prompt's blocks are touched last to first, so a block is always at least as recent as
those that continue it: the tail of a chain goes before its head, and holding a block means
holding all before it. The matched depth can therefore be found by bisection.

OrderedDict and not dict: taking the oldest of a dict is O(n) once many have been taken.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.index import Key


class BlockCache:
    """At most `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Sequence[Key]) -> int:
        """Return how many leading blocks of `chain` are held."""
        blocks = self._blocks
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def store(self, chain: Sequence[Key]) -> tuple[Sequence[Key], list[Key]]:
        """Hold all of `chain`, as far as it fits; return what is new and what had to go."""
        chain = chain[: self.capacity]
        blocks = self._blocks
        depth = self.match(chain)
        stored = chain[depth:]
        # whole runs at a time, by loops of the interpreter's own: this is the simulator's
        # most frequent work
        blocks.update(dict.fromkeys(reversed(stored)))
        _exhaust(map(blocks.move_to_end, reversed(chain[:depth])))
        evicted = list(islice(blocks, max(0, len(blocks) - self.capacity)))
        _exhaust(map(blocks.__delitem__, evicted))
        return stored, evicted

    def clear(self) -> None:
        """Forget everything: the node died."""
        self._blocks.clear()


def _exhaust(calls: Iterator[None]) -> None:
    deque(calls, maxlen=0)
