"""A node's part of the block cache, beside its engine: what `store:` in cluster.yaml asks for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from base.block_hash import BlockHash
from base.clock import Clock
from base.config import NodeProcess, StoreConfig
from base.logs import event
from base.metrics import StoreMetrics
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.build import Engine
from engine.paged_cache import PagedCache
from kvstore.client import BlockCache
from kvstore.engine_store import EngineStore
from kvstore.hosting import block_cache, hosted_store
from kvstore.settings import of_node
from kvstore.store import Store
from transfer.agent import TransferAgent
from transfer.segment import Segment

log = logging.getLogger(__name__)


class PagedBlocks:
    """An engine's cache as the block cache sees it."""

    def __init__(self, pool: BlockPool, cache: PagedCache, segment: Segment) -> None:
        self._pool = pool
        self._cache = cache
        self.segment = segment
        self.block_bytes = cache.layout.block_bytes
        self.block_tokens = cache.layout.block_size

    def hold(self, chain: Sequence[BlockHash]) -> list[int]:
        return self._pool.match(chain)

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.release(block_ids)

    async def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return await block_sums(self._cache, block_ids)


@dataclass(frozen=True, slots=True)
class NodeStore:
    """What a node has of the block cache."""

    beside: EngineStore
    own: Store | None
    """Its own part of it; None: it is a client of others."""


@asynccontextmanager
async def node_store(
    config: NodeProcess,
    engine: Engine,
    segment: Segment,
    agent: TransferAgent,
    clock: Clock,
    metrics: StoreMetrics,
) -> AsyncIterator[NodeStore | None]:
    """The node's part of the block cache, up for the length of the body; None if it has none.

    Raises:
        ConfigError: the disk, the memory or a value in `store:` will not do.
    """
    if not config.store.is_used:
        yield None
        return
    if segment.device is not None:
        event(log, "no store beside a GPU's cache yet", level=logging.WARNING)
        yield None
        return
    blocks = PagedBlocks(engine.pool, engine.cache, segment)
    settings = of_node(config.store, config.node_id, blocks.block_bytes, config.transfer)
    if config.store.dram_gib:
        async with hosted_store(settings, agent, clock, metrics) as hosted:
            yield NodeStore(
                _beside(config.store, blocks, hosted.cache, hosted.store, clock, metrics), hosted.store
            )
    else:
        async with block_cache(settings, agent, clock) as cache:
            yield NodeStore(_beside(config.store, blocks, cache, None, clock, metrics), None)


def _beside(
    config: StoreConfig,
    blocks: PagedBlocks,
    cache: BlockCache,
    own: Store | None,
    clock: Clock,
    metrics: StoreMetrics,
) -> EngineStore:
    bytes_per_s = config.save_mib_per_s * (1 << 20)
    beside = EngineStore(blocks, cache, own, bytes_per_s, clock, has_quotas=config.tenant_quota < 1)
    metrics.engine_blocks.labels("saved").set_function(lambda: beside.num_saved)
    metrics.engine_blocks.labels("loaded").set_function(lambda: beside.num_loaded)
    metrics.engine_blocks.labels("dropped").set_function(lambda: beside.num_dropped)
    return beside
