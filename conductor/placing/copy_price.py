"""The price of a copy: seconds of recompute that storing one more block causes, as the cluster shows it.

A node with a full cache evicts a block for each that it stores. Whether somebody misses it is seen later:
its key is remembered here, and a prompt that names it, while no node holds it, computes it again. Those
seconds, over all blocks that were evicted, are what one more block costs: nothing while caches have room,
nothing where what is evicted was not wanted again or is held elsewhere too, and much where sessions come back
to what had to go.

Keys are remembered for as many evictions as the cluster holds blocks, to twice as many: who comes back so
soon would have found its block in a cache that much larger, and later ones not. Pure state, without a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvstore.index import Key, PrefixIndex

# Evicted blocks that are taken to have cost nothing before any was seen: the first few say little.
FEWEST_EVICTED = 256.0


class CopyPrice:
    """Seconds that a block stored costs others, learned from evictions and from prompts that miss them."""

    def __init__(self, index: PrefixIndex) -> None:
        self.block_s = 0.0
        """Predicted seconds of recompute for each block that a full cache stores."""
        self._index = index
        self._young: set[Key] = set()
        self._old: set[Key] = set()
        self._num_evicted = FEWEST_EVICTED
        self._recomputed_s = 0.0

    def evicted(self, keys: Sequence[Key]) -> None:
        """Take in that a node dropped blocks; its index knows it already."""
        self._young |= self._index.held_nowhere(keys)
        capacity = len(self._index)
        if len(self._young) > capacity:
            self._old, self._young = self._young, set()
        self._num_evicted += len(keys)
        if self._num_evicted > max(capacity, 2 * FEWEST_EVICTED):
            self._num_evicted /= 2
            self._recomputed_s /= 2
        self.block_s = self._recomputed_s / self._num_evicted

    def num_missed(self, chain: Sequence[Key], depth: int) -> int:
        """Return how many blocks of `chain` from `depth` on were held until not long ago."""
        young, old = self._young, self._old
        end = depth
        while end < len(chain) and (chain[end] in young or chain[end] in old):
            end += 1
        return end - depth

    def recomputed(self, chain: Sequence[Key], depth: int, blocks: int, seconds: float) -> None:
        """Take in that so many blocks from `depth` on are computed again, which costs `seconds`."""
        for key in chain[depth : depth + blocks]:
            self._young.discard(key)
            self._old.discard(key)
        self._recomputed_s += seconds
        self.block_s = self._recomputed_s / self._num_evicted

    def restore(self, block_s: float) -> None:
        """Make this exactly what a block costs: for decisions made again."""
        self.block_s = block_s
        self._num_evicted = inf
