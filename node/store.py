"""A node's part of the block cache, beside its engine: what `store:` in cluster.yaml asks for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from base.block_hash import HASH_BYTES, BlockHash
from base.clock import Clock
from base.config import NodeProcess
from base.errors import LostError
from base.logs import event
from base.metrics import StoreMetrics
from engine.block_sums import block_sums, sum_kind
from engine.build import Engine
from kvstore.block_mover import BlockMover, SegmentMover, ShardMover
from kvstore.engine_store import EngineStore
from kvstore.hosting import block_cache, hosted_store
from kvstore.settings import of_node
from kvstore.store import Store
from node.own_cache import OwnCache, RankedCache, SegmentCache
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment
from transfer.shard import NodeKv

log = logging.getLogger(__name__)

PIN_TRIES = 3
"""The first ends when the pool is pinned, however late; another one copies."""


@asynccontextmanager
async def node_store(
    config: NodeProcess,
    engine: Engine,
    kv: NodeKv,
    segment: Segment,
    agent: TransferAgent,
    clock: Clock,
    metrics: StoreMetrics,
) -> AsyncIterator[EngineStore | None]:
    """Keep the node's part of the block cache up for the length of the body; None: it has none.

    Raises:
        ConfigError: the disk, the memory or a value in `store:` will not do.
    """
    if not config.store.is_used:
        yield None
        return
    if engine.ranks is not None and not config.store.dram_gib:
        event(log, "no store for several ranks without dram_gib", level=logging.WARNING)
        yield None
        return
    settings = of_node(config, engine.layout.block_bytes)
    sums = partial(block_sums, engine.cache)
    one_segment = partial(SegmentMover, segment=segment, block_bytes=engine.layout.block_bytes, sums=sums)

    def beside(mover: BlockMover, own: Store | None) -> EngineStore:
        rate, has_quotas = config.store.save_mib_per_s * (1 << 20), config.store.tenant_quota < 1
        made = EngineStore(engine.pool, engine.layout, mover, own, rate, clock, has_quotas=has_quotas)
        metrics.engine_blocks.labels("saved").set_function(lambda: made.num_saved)
        metrics.engine_blocks.labels("loaded").set_function(lambda: made.num_loaded)
        metrics.engine_blocks.labels("dropped").set_function(lambda: made.num_dropped)
        return made

    if not config.store.dram_gib:
        found = settings.redis_url, settings.peers
        async with block_cache(*found, agent, clock, settings.tls, settings.block_bytes) as cache:
            yield beside(one_segment(cache), None)
        return
    async with hosted_store(settings, agent, clock, metrics) as hosted:
        if segment.device is not None:
            await pin_pool(hosted.store, agent, segment)
        mover: BlockMover = one_segment(hosted.cache)
        if engine.ranks is not None:
            mover = ShardMover(kv, hosted.store, agent.descriptor, sum_kind(engine.cache))
        yield beside(mover, hosted.store)


def own_cache(
    engine: Engine, segment: Segment, agent: TransferAgent, beside: EngineStore | None
) -> OwnCache | None:
    """Return the node's cache as other nodes use it; None: of several ranks without a store, they cannot."""
    own = beside.own if beside is not None else None
    if engine.ranks is None:
        return SegmentCache(engine.pool, engine.cache, segment, agent, own)
    if beside is None or own is None:
        return None
    return RankedCache(beside, own, agent)


async def pin_pool(store: Store, agent: TransferAgent, segment: Segment) -> None:
    """Copy one block from a GPU's cache to the store and forget it.

    It has the pool pinned and the copying kernel compiled, many seconds for a large pool,
    which no request shall wait for. A copy that runs out of time fails once the pool is pinned,
    and its grant may have ended by then: each try has its own.
    """
    for _ in range(PIN_TRIES):
        reserved = store.reserve([BlockHash(bytes(HASH_BYTES))], "")
        if reserved.grant is None:
            return
        pieces = pieces_of(segment, [0], reserved.grant.offsets, reserved.grant.length)
        try:
            await agent.write(agent.descriptor, reserved.grant, pieces)
        except LostError as error:
            event(log, "store not pinned yet", level=logging.WARNING, reason=error)
        else:
            return
        finally:
            await store.abort(reserved.ticket)
