"""Blocks set aside for KV to come: taken while the prompt is computed, given back by one path.

What the node holds of the sequence's prefix already is matched, and needs no bytes; a
grant of each rank lets the prefill node write the other blocks. Grants end before the blocks
are read or given back, and their end waits for writes in flight: no byte arrives in a block
that has another owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from base.block_hash import BlockHash, hash_chain
from base.errors import ChecksumError
from base.grants import RankGrant
from base.kv_layout import KvPart, is_partition
from base.messages import Reserved, Start, Work
from base.request import RequestId
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from transfer.shard import KvShard, NodeKv

EVERY = slice(None)


class Reservation:
    """The blocks of one sequence's prompt, in order."""

    def __init__(self, kv: NodeKv, chain: list[BlockHash], block_ids: list[int], num_matched: int) -> None:
        self._kv = kv
        self.chain = chain
        """Hashes of the prompt's full blocks."""
        self.block_ids = block_ids
        self.num_matched = num_matched
        """Leading blocks that were here; the others are to be written."""
        self.grants: list[RankGrant] = []
        """One for each rank; none: nothing is to be written."""
        self.is_taken = False

    @property
    def written(self) -> list[int]:
        return self.block_ids[self.num_matched :]

    def answer(self, request_id: RequestId) -> Reserved:
        """Return the answer to the conductor."""
        if len(self.grants) == 1:
            return Reserved(request_id, self.num_matched, self.grants[0].grant)
        return Reserved(request_id, self.num_matched, None, tuple(self.grants))

    async def open(self, lease_s: float) -> None:
        """Let peers write what is to be written."""
        for shard in self._kv.shards if self.written else ():
            self.grants.append(await shard.grant(self.written, lease_s))

    async def close(self) -> None:
        """Refuse further writes, and return when none is in flight, on any rank. Again: no effect."""
        await uninterrupted(self._end_grants())

    async def _end_grants(self) -> None:
        for shard, granted in zip(self._kv.shards, self.grants, strict=False):
            await shard.revoke(granted.grant)

    def take(self) -> list[int]:
        """Return the block ids; whoever calls this releases them."""
        self.is_taken = True
        return list(self.block_ids)


@asynccontextmanager
async def reserved(pool: BlockPool, kv: NodeKv, work: Work) -> AsyncIterator[Reservation]:
    """Hold blocks for the prompt of `work` in the body, and grants to write them.

    The body may take the blocks over; otherwise they are given back when it is left.

    Raises:
        CapacityError: too few blocks are free. Nothing was taken.
    """
    chain = hash_chain(work.token_ids, kv.layout.block_size, work.chain_root)
    matched = pool.match(chain)
    try:
        block_ids = matched + pool.allocate_spare(kv.layout.num_blocks(len(work.token_ids)) - len(matched))
    except BaseException:
        pool.release(matched)
        raise
    reservation = Reservation(kv, chain, block_ids, len(matched))
    try:
        try:
            # Cancelled halfway, nobody would know of a grant that another rank has given.
            await uninterrupted(reservation.open(work.deadline_s))
            yield reservation
        finally:
            await reservation.close()
    finally:
        if not reservation.is_taken:
            pool.release(block_ids)


async def require_intact(kv: NodeKv, reservation: Reservation, start: Start, some: slice = EVERY) -> None:
    """Compare written blocks with what their writers computed.

    Args:
        some: Of `reservation.written`.

    Raises:
        ChecksumError: a block is not what was sent, or nobody vouches for some of it. What was
            computed from the blocks must be dropped.
    """
    blocks = reservation.written[some]
    found = [await _shard(kv, part).sums(blocks, part) for part in _parts(kv, start)]
    _compare(reservation, start, some, found)


def intact_in_order(kv: NodeKv, reservation: Reservation, start: Start) -> Awaitable[None] | None:
    """Return the same, of all that was written, to be waited for while steps run that write behind it.

    None: the node's shards cannot; then `require_intact` has to end before such a step is launched.
    """
    parts = _parts(kv, start)
    sums = [_shard(kv, part).sums_in_order(reservation.written, part) for part in parts]
    begun = [each for each in sums if each is not None]
    if len(begun) < len(parts):
        return None

    async def compared() -> None:
        _compare(reservation, start, EVERY, [await each for each in begun])

    return asyncio.ensure_future(compared())


def _parts(kv: NodeKv, start: Start) -> tuple[KvPart, ...]:
    parts = start.parts or (kv.whole,)
    # Parts come off the wire, and each is compared with each shard's.
    if len(parts) <= kv.whole.num_layers * kv.whole.num_heads:
        of_shards: dict[KvPart, list[KvPart]] = {shard.part: [] for shard in kv.shards}
        for part in parts:
            of_shards[_shard(kv, part).part].append(part)
        if all(is_partition(own, whole) for whole, own in of_shards.items()):
            return parts
    raise ChecksumError("nobody vouches for some of the blocks, or two do")


def _compare(reservation: Reservation, start: Start, some: slice, arrived: list[list[int]]) -> None:
    """Raise ChecksumError unless the sums that were found, part by part, are those of the writers."""
    num_written = len(reservation.written)
    if len(start.checksums) != num_written * len(arrived):
        raise ChecksumError(
            f"{len(start.checksums)} checksums for {num_written} blocks in {len(arrived)} parts"
        )
    for number, found in enumerate(arrived):
        sent = start.checksums[number * num_written : (number + 1) * num_written][some]
        for index, one, other in zip(range(num_written)[some], found, sent, strict=True):
            if one != other:
                raise ChecksumError(f"block {reservation.num_matched + index} of the prompt arrived damaged")


def _shard(kv: NodeKv, part: KvPart) -> KvShard:
    for shard in kv.shards:
        if shard.part.overlap(part) == part:
            return shard
    raise ChecksumError("a checksum is of what several ranks have")
