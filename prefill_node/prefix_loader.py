"""Loads a prefix from elsewhere into this node's cache, before the prompt is computed.

A prefix source is whatever has KV that this engine's cache lacks: the node's own store and,
through it, the cluster's block cache (`kvstore/engine_store.py`); or blocks of another node,
lent because the conductor found that reading them is sooner done than computing them. They
are asked in that order, each for what is still missing.

Loaded blocks are compared with the checksums made where they were computed and published
here, so that the engine's own prefix match finds them: loading needs no second path through
the engine, and a replica stays on this node, which is how hot blocks spread.

KV that cannot be loaded is never an error: the prompt is computed from what is here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from base.block_hash import BlockHash, hash_chain
from base.errors import ChecksumError, LostError, ServeError
from base.logs import event
from base.messages import Source, Work
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.segment import Segment

log = logging.getLogger(__name__)


class PrefixSource(Protocol):
    """Where blocks of a chain can be had, other than by computing them."""

    async def reach(self, chain: Sequence[BlockHash], first: int) -> int:
        """Return the index after the last block worth loading, if block `first` is the first missing."""
        ...

    async def load(self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int) -> int:
        """Put blocks `first` to the end of `chain` into `block_ids`; return how many came, all right.

        Raises:
            ServeError: they cannot be had, or are not what they should be.
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnCache:
    """This node's paged cache, and by what its blocks are read and written from outside."""

    pool: BlockPool
    cache: PagedCache
    segment: Segment
    agent: TransferAgent
    is_whole: bool = True
    """Whether `cache` has all of a block. If other ranks have the rest, nothing is lent, loaded or
    fetched: what moves a part from or to each is not built."""

    def require_whole(self) -> None:
        """Raise LostError if other ranks have a part of each block."""
        if not self.is_whole:
            raise LostError("the blocks of this node are with several ranks, and are not lent or fetched")


class LentPrefix:
    """Blocks that another node lent."""

    def __init__(self, own: OwnCache, source: Source) -> None:
        self._own = own
        self._source = source

    async def reach(self, chain: Sequence[BlockHash], first: int) -> int:
        if first < self._source.first_block:
            return first  # evicted meanwhile: a gap cannot be loaded over
        return min(self._source.first_block + len(self._source.grant.offsets), len(chain))

    async def load(self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int) -> int:
        own, source = self._own, self._source
        layout = own.cache.layout
        skipped = first - source.first_block
        batch = batch_of(
            own.segment,
            source_offsets=source.grant.offsets[skipped : skipped + len(block_ids)],
            target_offsets=[layout.offset(block_id) for block_id in block_ids],
            length=layout.block_bytes,
        )
        await own.agent.read(source.peer, source.grant, batch)
        expected = list(source.checksums[skipped : skipped + len(block_ids)])
        if await block_sums(own.cache, block_ids) != expected:
            raise ChecksumError("a loaded block is not the one that was lent")
        return len(block_ids)


@asynccontextmanager
async def loaded_prefix(
    pool: BlockPool, block_size: int, work: Work, sources: Sequence[PrefixSource]
) -> AsyncIterator[None]:
    """Have what the sources can give in this node's cache, and held, for the body."""
    held: list[int] = []
    try:
        # The last token is always computed, so a block that ends with it is not needed.
        longest = (len(work.token_ids) - 1) // block_size
        chain = hash_chain(work.token_ids[: longest * block_size], block_size, work.chain_root)
        held += pool.match(chain) if sources else []
        for source in sources:
            try:
                await load_missing(pool, chain, source, held)
            except ServeError as error:
                reason = f"{type(error).__name__}: {error}"
                event(
                    log,
                    "prefix not loaded",
                    level=logging.WARNING,
                    request_id=work.request_id,
                    source=type(source).__name__,
                    reason=reason,
                )
        yield
    finally:
        pool.release(held)


async def load_missing(
    pool: BlockPool, chain: Sequence[BlockHash], source: PrefixSource, held: list[int]
) -> None:
    """Put into `held` the blocks that come from `source`, after those that are there.

    Raises:
        CapacityError: too few blocks are free.
        ServeError: as `PrefixSource.load`.
    """
    first = len(held)
    if first >= len(chain):
        return
    end = min(await source.reach(chain, first), len(chain))
    if end <= first:
        return
    block_ids = pool.allocate_spare(end - first)
    count = 0
    try:
        count = await source.load(chain[:end], block_ids, first)
        for block_id, block_hash in zip(block_ids[:count], chain[first:end], strict=False):
            pool.publish(block_id, block_hash)
        held += block_ids[:count]
    finally:
        pool.release(block_ids[count:])
