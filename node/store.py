"""A node's part of the block cache, beside its engine: what `store:` in cluster.yaml asks for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from base.block_hash import HASH_BYTES, BlockHash
from base.clock import Clock
from base.config import NodeProcess
from base.errors import LostError, TransferFailedError
from base.kv_layout import KvLayout
from base.logs import event
from base.metrics import StoreMetrics
from engine.block_pool import BlockPool
from engine.block_sums import block_sums, sum_kind
from engine.build import Engine
from kvstore.block_mover import BlockMover, SegmentMover
from kvstore.engine_store import EngineStore
from kvstore.hosting import block_cache, hosted_store
from kvstore.settings import of_node
from kvstore.shard_mover import ShardMover
from kvstore.store import Store
from node.own_cache import OwnCache, SegmentCache
from node.ranked_cache import RankedCache
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment
from transfer.shard import NodeKv

log = logging.getLogger(__name__)

PIN_TRIES = 3
"""Each as long as a transfer may take; a pool that is pinned later costs its first request that time."""


class PagedBlocks:
    """An engine's cache as the block cache sees it."""

    def __init__(self, pool: BlockPool, layout: KvLayout) -> None:
        self._pool = pool
        self.block_bytes = layout.block_bytes
        self.block_tokens = layout.block_size

    def hold(self, chain: Sequence[BlockHash]) -> list[int]:
        return self._pool.match(chain)

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.release(block_ids)


@dataclass(frozen=True, slots=True)
class NodeStore:
    """The block cache as one node has it."""

    beside: EngineStore | None = None
    own: Store | None = None
    """The node's own part of the cache; None: the node is a client of others."""


@asynccontextmanager
async def node_store(
    config: NodeProcess,
    engine: Engine,
    kv: NodeKv,
    segment: Segment,
    agent: TransferAgent,
    clock: Clock,
    metrics: StoreMetrics,
) -> AsyncIterator[NodeStore]:
    """Keep the node's part of the block cache up for the length of the body, empty if it has none.

    Raises:
        ConfigError: the disk, the memory or a value in `store:` will not do.
    """
    if not config.store.is_used:
        yield NodeStore()
        return
    if engine.ranks is not None and not config.store.dram_gib:
        event(log, "no store for several ranks without dram_gib", level=logging.WARNING)
        yield NodeStore()
        return
    settings = of_node(config, engine.layout.block_bytes)
    sums = partial(block_sums, engine.cache)
    one_segment = partial(SegmentMover, segment=segment, block_bytes=engine.layout.block_bytes, sums=sums)

    def beside(mover: BlockMover, own: Store | None) -> EngineStore:
        blocks, rate = PagedBlocks(engine.pool, engine.layout), config.store.save_mib_per_s * (1 << 20)
        made = EngineStore(blocks, mover, own, rate, clock, has_quotas=config.store.tenant_quota < 1)
        metrics.engine_blocks.labels("saved").set_function(lambda: made.num_saved)
        metrics.engine_blocks.labels("loaded").set_function(lambda: made.num_loaded)
        metrics.engine_blocks.labels("dropped").set_function(lambda: made.num_dropped)
        return made

    if not config.store.dram_gib:
        async with block_cache(settings.redis_url, settings.peers, agent, clock, settings.tls) as cache:
            yield NodeStore(beside(one_segment(cache), None), None)
        return
    async with hosted_store(settings, agent, clock, metrics) as hosted:
        if segment.device is not None:
            await pin_pool(hosted.store, agent, segment)
        mover: BlockMover = one_segment(hosted.cache)
        if engine.ranks is not None:
            mover = ShardMover(kv, hosted.store, agent.descriptor, sum_kind(engine.cache))
        yield NodeStore(beside(mover, hosted.store), hosted.store)


def own_cache(engine: Engine, segment: Segment, agent: TransferAgent, stored: NodeStore) -> OwnCache | None:
    """Return the node's cache as other nodes use it; None: of several ranks without a store, they cannot."""
    if engine.ranks is None:
        return SegmentCache(engine.pool, engine.cache, segment, agent, stored.own)
    if stored.beside is None or stored.own is None:
        return None
    return RankedCache(stored.beside, stored.own, agent)


async def pin_pool(store: Store, agent: TransferAgent, segment: Segment) -> None:
    """Copy one block from a GPU's cache to the store and forget it.

    It has the pool pinned and the copying kernel compiled, many seconds for a large pool,
    which no request shall wait for. Pinning goes on when a copy runs out of time, so the
    next one finds more of it done.
    """
    reserved = store.reserve([BlockHash(bytes(HASH_BYTES))], "")
    if reserved.grant is None:
        return
    pieces = pieces_of(segment, [0], reserved.grant.offsets, reserved.grant.length)
    try:
        for _ in range(PIN_TRIES):
            try:
                await agent.write(agent.descriptor, reserved.grant, pieces)
            except TransferFailedError as error:
                event(log, "store not pinned", level=logging.WARNING, reason=error)
            else:
                return
    except LostError as error:
        event(log, "store not pinned", level=logging.WARNING, reason=error)
    finally:
        await store.abort(reserved.ticket)
