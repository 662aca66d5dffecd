"""What a node of several ranks lends of its cache, and how it takes in what others lend.

No rank has a whole block, and a lent block has one checksum. So both go by the node's store, where
blocks lie whole: what is asked for is saved there and lent from there, and what another node lent
is read into the store, loaded from there by each rank and compared then. A node without a store does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from base.block_hash import BlockHash
from base.messages import FromNode, Lend, Source
from engine.block_pool import BlockPool
from kvstore.client import Stripes
from kvstore.engine_store import EngineStore
from kvstore.lending import lend_stored, store_lent
from kvstore.store import Store
from node.own_cache import reach_of
from prefill_node.prefix_loader import PrefixSource
from transfer.agent import TransferAgent


class RankedCache:
    """`OwnCache` of a node of several ranks.

    Args:
        beside: To save to `store` and load from there.
    """

    def __init__(self, pool: BlockPool, beside: EngineStore, store: Store, agent: TransferAgent) -> None:
        self.pool = pool
        self.beside = beside
        self.store = store
        self.agent = agent

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        await self.beside.save_now(message.chain)
        await lend_stored(self.store, message, send)

    def lent(self, source: Source) -> PrefixSource:
        return StagedPrefix(self, source)


class StagedPrefix:
    """Blocks that another node lent, read into the store and loaded from there."""

    def __init__(self, own: RankedCache, source: Source) -> None:
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
        own = self._own
        # The store takes no block without those before it, which maybe the engine alone has.
        await own.beside.save_now(chain[:first])
        await store_lent(own.store, own.agent, chain, self._source)
        return await own.beside.load(chain, block_ids, first, stripes)
