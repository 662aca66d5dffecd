"""The cache of a node of several ranks, as it is lent to other nodes and takes in what they lend.

No rank has a whole block, and a lent block has one checksum. So both go by the node's store, where
blocks lie whole: what is asked for is saved there and lent from there, and what another node lent
is read into the store, loaded from there by each rank and compared then. A node without a store does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from base.block_hash import BlockHash
from base.messages import FromNode, Lend, Source
from kvstore.client import Stripes
from kvstore.engine_store import EngineStore
from kvstore.lending import lend_stored, store_lent
from kvstore.store import Store
from node.own_cache import LentPrefix
from prefill_node.prefix_loader import PrefixSource
from transfer.agent import TransferAgent


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

    def lent(self, source: Source) -> PrefixSource:
        return LentPrefix(source, partial(self._load, source))

    async def _load(
        self,
        source: Source,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None,
    ) -> int:
        """Read blocks that another node lent into the store, and load them from there."""
        # The store takes no block without those before it, which maybe the engine alone has.
        await self.beside.save_now(chain[:first])
        await store_lent(self.store, self.agent, chain, source)
        return await self.beside.load(chain, block_ids, first, stripes)
