"""The cache of a node as other nodes use it: blocks are lent to them, and theirs are taken in.

Every node lends, whatever its role: what a decode node generated is the prefix of a conversation's next
turn. The blocks that are lent are held, so that they stay what they are, and the other node reads them
itself (`prefill_node/prefix_loader.py`), until `Release`, the deadline, or the end of the conductor's
stream. What the node's store has of a chain is lent from there where that is more.

Of several ranks none has a whole block, and a lent block has one checksum. So both go by the node's store,
where blocks lie whole: what is asked for is saved there and lent from there, and what another node lent is
read into the store, loaded from there by each rank and compared then. Without a store it does neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from base.block_hash import BlockHash
from base.errors import ChecksumError, LostError
from base.grants import Operation
from base.messages import FromNode, Lend, Lent, Source
from base.request_tasks import RequestTasks
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from kvstore.client import Stripes
from kvstore.engine_store import EngineStore
from kvstore.lending import lend_stored, store_lent
from kvstore.store import Store
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment


class OwnCache(Protocol):
    """A node's cache as other nodes use it. Belongs to the event loop."""

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        """Hold what `message` asks for, say where it may be read, and wait until it ran out or is cancelled.

        Raises:
            LostError: none of the blocks is here.
            CapacityError: too many grants are live.
        """
        ...

    async def load(
        self,
        source: Source,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None,
    ) -> int:
        """Take in what another node lent, as `PrefixSource.load`."""
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
                with self.pool.sharing_nothing(block_ids):
                    await asyncio.sleep(message.lease_s)
            finally:
                await uninterrupted(self.agent.revoke(grant))
        finally:
            self.pool.release(block_ids)

    async def load(
        self,
        source: Source,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None,
    ) -> int:
        layout = self.cache.layout
        skipped = first - source.first_block
        theirs = slice(skipped, skipped + len(block_ids))
        ours = [layout.offset(block_id) for block_id in block_ids]
        pieces = pieces_of(self.segment, ours, source.grant.offsets[theirs], layout.block_bytes)
        await self.agent.read(source.peer, source.grant, pieces)
        if await block_sums(self.cache, block_ids) != list(source.checksums[theirs]):
            raise ChecksumError("a loaded block is not the one that was lent")
        return len(block_ids)


class RankedCache:
    """`OwnCache` of a node of several ranks.

    Args:
        beside: To save to `store` and load from there.
    """

    def __init__(self, beside: EngineStore, store: Store, agent: TransferAgent) -> None:
        self.beside = beside
        self.store = store
        self.agent = agent

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        await self.beside.save_now(message.chain)
        await lend_stored(self.store, message, send)

    async def load(
        self,
        source: Source,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None,
    ) -> int:
        # The store takes no block without those before it, which maybe the engine alone has.
        await self.beside.save_now(chain[:first])
        await store_lent(self.store, self.agent, chain, source)
        return await self.beside.load(chain, block_ids, first, stripes)


class LentPrefix:
    """Blocks that another node lent, as a source of a prefix."""

    def __init__(self, own: OwnCache, source: Source) -> None:
        self._source = source
        self.load = partial(own.load, source)

    async def reach(self, chain: Sequence[BlockHash], first: int) -> int:
        source = self._source
        if first < source.first_block:
            return first  # evicted meanwhile: a gap cannot be loaded over
        return min(source.first_block + len(source.grant.offsets), len(chain))


class Lender:
    """Answers `Lend` messages of one conductor. Belongs to the event loop."""

    def __init__(
        self, own: OwnCache | None, group: asyncio.TaskGroup, send: Callable[[FromNode], None]
    ) -> None:
        """Begin without lent blocks. `own`: None where this node cannot lend."""
        self._own = own
        self._send = send
        self.tasks = RequestTasks(group, send)

    def lend(self, message: Lend) -> None:
        self.tasks.start(message.request_id, self._lend(message))

    async def _lend(self, message: Lend) -> None:
        if self._own is None:
            raise LostError("this node has several ranks and no store, and lends nothing")
        await self._own.lend(message, self._send)
