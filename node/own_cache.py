"""What a node of one rank lends of its cache, and how it takes in what others lend.

The blocks that are lent are held, so that they stay what they are, and are read by the other
node itself. What the node's store has of a chain is lent from there where that is more.
Of several ranks: `ranked_cache.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from base.block_hash import BlockHash
from base.errors import ChecksumError, LostError
from base.grants import Operation
from base.messages import FromNode, Lend, Lent, Source
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from kvstore.client import Stripes
from kvstore.lending import lend_stored
from kvstore.store import Store
from prefill_node.prefix_loader import PrefixSource
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment


class OwnCache(Protocol):
    """A node's cache as other nodes use it. Belongs to the event loop."""

    @property
    def pool(self) -> BlockPool: ...

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        """Hold what `message` asks for, say where it may be read, and wait until it ran out or is cancelled.

        Raises:
            LostError: none of the blocks is here.
            CapacityError: too many grants are live.
        """
        ...

    def lent(self, source: Source) -> PrefixSource:
        """Return what another node lent, as a source to load from."""
        ...


class SegmentCache:
    """`OwnCache` of a cache that one segment has whole."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        segment: Segment,
        agent: TransferAgent,
        store: Store | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.segment = segment
        self.agent = agent
        self._store = store

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        block_ids = self.pool.match(message.chain)
        if self._store is not None and self._store.match(message.chain).num_blocks > len(block_ids):
            self.pool.release(block_ids)
            await lend_stored(self._store, message, send)
            return
        try:
            wanted = block_ids[message.first_block :]
            if not wanted:
                raise LostError("the blocks were evicted")
            sums = await block_sums(self.cache, wanted)
            layout = self.cache.layout
            offsets = [layout.offset(block_id) for block_id in wanted]
            grant = self.agent.grant(
                self.segment, offsets, layout.block_bytes, Operation.READ, message.lease_s
            )
            try:
                send(Lent(message.request_id, grant, tuple(sums)))
                await asyncio.sleep(message.lease_s)
            finally:
                await uninterrupted(self.agent.revoke(grant))
        finally:
            self.pool.release(block_ids)

    def lent(self, source: Source) -> PrefixSource:
        return LentPrefix(self, source)


def reach_of(source: Source, chain: Sequence[BlockHash], first: int) -> int:
    """Return the index after the last block that `source` has of a chain of which `first` is missing."""
    if first < source.first_block:
        return first  # evicted meanwhile: a gap cannot be loaded over
    return min(source.first_block + len(source.grant.offsets), len(chain))


class LentPrefix:
    """Blocks that another node lent, read straight into the cache."""

    def __init__(self, own: SegmentCache, source: Source) -> None:
        self._own = own
        self._source = source

    async def reach(self, chain: Sequence[BlockHash], first: int) -> int:
        return reach_of(self._source, chain, first)

    async def load(
        self,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None = None,
    ) -> int:
        own, source = self._own, self._source
        layout = own.cache.layout
        skipped = first - source.first_block
        pieces = pieces_of(
            own.segment,
            [layout.offset(block_id) for block_id in block_ids],
            source.grant.offsets[skipped : skipped + len(block_ids)],
            layout.block_bytes,
        )
        await own.agent.read(source.peer, source.grant, pieces)
        expected = list(source.checksums[skipped : skipped + len(block_ids)])
        if await block_sums(own.cache, block_ids) != expected:
            raise ChecksumError("a loaded block is not the one that was lent")
        return len(block_ids)
