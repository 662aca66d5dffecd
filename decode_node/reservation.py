"""Blocks set aside for KV to come: taken before the prefill starts, given back by one path.

What the node holds of the sequence's prefix already is matched, and needs no bytes; a
grant lets the prefill node write the other blocks. The grant ends before the blocks are
read or given back, and its end waits for writes in flight: no byte arrives in a block
that has another owner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from base.block_hash import BlockHash, hash_chain
from base.errors import ChecksumError
from base.grants import Grant, Operation
from base.messages import Work
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from transfer.agent import TransferAgent
from transfer.segment import Segment


class Reservation:
    """The blocks of one sequence's prompt, in order."""

    def __init__(
        self, chain: list[BlockHash], block_ids: list[int], num_matched: int, grant: Grant | None
    ) -> None:
        self.chain = chain
        """Of the full blocks."""
        self.block_ids = block_ids
        self.num_matched = num_matched
        """Leading blocks that were here; the others are to be written."""
        self.grant = grant
        """None: nothing is to be written."""
        self.is_taken = False

    @property
    def written(self) -> list[int]:
        return self.block_ids[self.num_matched :]

    async def close(self, agent: TransferAgent) -> None:
        """Refuse further writes, and return when none is in flight. Again: no effect."""
        if self.grant is not None:
            await uninterrupted(agent.revoke(self.grant))

    def take(self) -> list[int]:
        """Return the block ids; whoever calls this releases them."""
        self.is_taken = True
        return list(self.block_ids)


@asynccontextmanager
async def reserved(
    pool: BlockPool, cache: PagedCache, segment: Segment, agent: TransferAgent, work: Work
) -> AsyncIterator[Reservation]:
    """Hold blocks for the prompt of `work` in the body, and a grant to write them.

    The body may take the blocks over; otherwise they are given back when it is left.

    Raises:
        CapacityError: too few blocks are free. Nothing was taken.
    """
    layout = cache.layout
    chain = hash_chain(work.token_ids, layout.block_size, work.chain_root)
    matched = pool.match(chain)
    try:
        block_ids = matched + pool.allocate_spare(layout.num_blocks(len(work.token_ids)) - len(matched))
    except BaseException:
        pool.release(matched)
        raise
    reservation = Reservation(chain, block_ids, len(matched), None)
    try:
        offsets = [layout.offset(block_id) for block_id in reservation.written]
        if offsets:
            reservation.grant = agent.grant(
                segment, offsets, layout.block_bytes, Operation.WRITE, lease_s=work.deadline_s
            )
        try:
            yield reservation
        finally:
            await reservation.close(agent)
    finally:
        if not reservation.is_taken:
            pool.release(block_ids)


async def require_intact(cache: PagedCache, reservation: Reservation, checksums: tuple[int, ...]) -> None:
    """Compare the written blocks with what their writer computed.

    Raises:
        ChecksumError: a block is not what was sent. The blocks must not be read.
    """
    written = reservation.written
    if len(written) != len(checksums):
        raise ChecksumError(f"{len(checksums)} checksums for {len(written)} blocks")
    arrived = await block_sums(cache, written)
    for index, (found, expected) in enumerate(zip(arrived, checksums, strict=True)):
        if found != expected:
            raise ChecksumError(f"block {reservation.num_matched + index} of the prompt arrived damaged")
