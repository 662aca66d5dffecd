"""Loads a prefix from another node into this one's cache, before the prompt is computed.

The conductor found that another node holds a longer prefix, and that reading it is sooner
done than computing it; that node has lent the blocks. Loaded blocks are compared with the
lender's checksums and published here, so that the engine's own prefix match finds them:
loading needs no second path through the engine, and a replica stays on this node, which is
how hot blocks spread.

KV that cannot be loaded is never an error: the prompt is computed from what is here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from base.block_hash import hash_chain
from base.errors import ChecksumError, ServeError
from base.logs import event
from base.messages import Source, Work
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from transfer.agent import TransferAgent
from transfer.batch import TransferRequest
from transfer.segment import Segment

log = logging.getLogger(__name__)


@asynccontextmanager
async def loaded_prefix(
    pool: BlockPool,
    cache: PagedCache,
    segment: Segment,
    agent: TransferAgent,
    work: Work,
    source: Source | None,
) -> AsyncIterator[None]:
    """Have the source's blocks in this node's cache, and held, for the body, if they can be had."""
    held: list[int] = []
    try:
        if source is not None:
            try:
                await _load(pool, cache, segment, agent, work, source, held)
            except ServeError as error:
                reason = f"{type(error).__name__}: {error}"
                event(
                    log,
                    "prefix not loaded",
                    level=logging.WARNING,
                    request_id=work.request_id,
                    source=source.peer.node_id,
                    reason=reason,
                )
        yield
    finally:
        pool.release(held)


async def _load(
    pool: BlockPool,
    cache: PagedCache,
    segment: Segment,
    agent: TransferAgent,
    work: Work,
    source: Source,
    held: list[int],
) -> None:
    """Put into `held` the blocks up to the source's last: matched ones, then loaded ones.

    Raises:
        CapacityError: too few blocks are free.
        LostError: the source is gone, or what arrived is not what was lent.
    """
    layout = cache.layout
    chain = hash_chain(work.token_ids, layout.block_size, work.chain_root)
    end = min(source.first_block + len(source.grant.offsets), len(chain))
    held += pool.match(chain[:end])
    first = len(held)
    if first < source.first_block or first >= end:
        return  # evicted meanwhile: a gap cannot be loaded over; or there is nothing to load
    loaded = pool.allocate(end - first)
    held += loaded
    skipped = first - source.first_block
    await agent.read(
        source.peer,
        source.grant,
        [
            TransferRequest(
                segment=segment,
                source_offset=offset,
                target_offset=layout.offset(block_id),
                length=layout.block_bytes,
            )
            for block_id, offset in zip(loaded, source.grant.offsets[skipped:], strict=False)
        ],
        deadline_s=work.deadline_s,
    )
    expected = list(source.checksums[skipped : skipped + len(loaded)])
    if await block_sums(cache, loaded) != expected:
        raise ChecksumError("a loaded block is not the one that was lent")
    for block_id, block_hash in zip(loaded, chain[first:end], strict=True):
        pool.publish(block_id, block_hash)
