"""How blocks come from an engine's cache into the block cache, and back.

`EngineStore` decides what is saved and loaded, and when; a mover does it. There are two: of a
cache that is one segment, here, and of one that several ranks share (`shard_mover.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from base.block_hash import BlockHash
from kvstore.client import BlockCache, Stripes
from transfer.batch import Priority
from transfer.owned.segment import Segment


class BlockMover(Protocol):
    """Moves blocks between an engine's cache and the block cache. The caller holds the engine's blocks."""

    async def match(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `chain` can be had."""
        ...

    async def num_saved(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks need not be saved."""
        ...

    async def save(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, tenant: str
    ) -> int:
        """Store blocks `first` to the end of `chain`, which are the engine's `block_ids`, in the background.

        Returns how many were newly stored. Raises ServeError.
        """
        ...

    async def load(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, stripes: Stripes | None
    ) -> int:
        """Load blocks `first` and on into the engine's `block_ids`; return how many came, all right.

        Raises ServeError.
        """
        ...


class SegmentMover:
    """`BlockMover` of a cache that is one segment of equal blocks.

    Args:
        sums: The engine's checksums of its blocks: it may be on a GPU, and alone able to take them.
    """

    def __init__(
        self,
        cache: BlockCache,
        segment: Segment,
        block_bytes: int,
        sums: Callable[[Sequence[int]], Awaitable[Sequence[int]]],
    ) -> None:
        self._cache = cache
        self._segment = segment
        self._block_bytes = block_bytes
        self._sums = sums
        self.match = cache.match
        self.num_saved = cache.num_saved

    async def save(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, tenant: str
    ) -> int:
        sums = await self._sums(block_ids)
        offsets = [block_id * self._block_bytes for block_id in block_ids]
        return await self._cache.save(
            chain, self._segment, offsets, sums, first, tenant, priority=Priority.BACKGROUND
        )

    async def load(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, stripes: Stripes | None
    ) -> int:
        size = self._block_bytes
        offsets = [block_id * size for block_id in block_ids]

        async def sums(landed: Sequence[int]) -> Sequence[int]:
            return await self._sums([offset // size for offset in landed])

        return await self._cache.load(chain, self._segment, offsets, first, sums=sums, stripes=stripes)
