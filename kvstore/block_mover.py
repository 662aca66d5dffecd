"""How blocks come from an engine's cache into the block cache, and back.

`EngineStore` decides what is saved and loaded, and when; a mover does it. There are two: of a cache that is
one segment, and of one that several ranks share.

Of several ranks too a stored block has all layers and heads in the one layout, as of one: any node of the
model may read it, however its ranks divide it. Each rank copies its own part, straight
between its memory and the pool's, so no rank ever has a whole block, of which a record has one
checksum. Where a GPU makes it, the sums of the parts add up to it, and that is all. Another kind is
compared in the pool, here:

saving   Each rank sums its part where it was made, and writes it. When all have, the whole is
         summed in the pool, and after that each part, which must be what its rank summed. Only
         a block of which all parts are is committed; so is nothing after it.
loading  Each part is summed in the pool, and after that the whole, which must be what the record
         says. Each rank sums what came to it, which must be that part.

The order is what makes it safe: bytes that change at any moment make one of the two wrong.
A rank that ends in the middle ends the node, and the put with it, which nobody can find.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from base.block_hash import BlockHash
from base.checksum import DEVICE_CHECKSUM_KIND, checksum_of_kind
from base.errors import CapacityError
from base.grants import Grant, PeerDescriptor
from base.kv_layout import KvLayout, KvPart, part_columns
from base.logs import event
from base.together import together
from base.uninterrupted import uninterrupted
from kvstore.client import BlockCache, Stripes, num_equal
from kvstore.store import Store
from transfer.batch import Priority
from transfer.owned.segment import Segment
from transfer.shard import BlockMove, KvShard, NodeKv

log = logging.getLogger(__name__)


class BlockMover(Protocol):
    """Moves blocks between an engine's cache and the block cache. The caller holds the engine's blocks."""

    async def match(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `chain` can be had."""
        ...

    async def num_saved(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks need not be saved."""
        ...

    async def save(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, tenant: str
    ) -> int:
        """Store blocks `first` to the end of `chain`, which are the engine's `block_ids`, in the background.

        Returns how many were newly stored. Raises ServeError.
        """
        ...

    async def load(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, stripes: Stripes | None
    ) -> int:
        """Load blocks `first` and on into the engine's `block_ids`; return how many came, all right.

        Raises ServeError.
        """
        ...


class SegmentMover:
    """`BlockMover` of a cache that is one segment of equal blocks.

    Args:
        sums: The engine's checksums of its blocks: it may be on a GPU, and alone able to take them.
    """

    def __init__(
        self,
        cache: BlockCache,
        segment: Segment,
        block_bytes: int,
        sums: Callable[[Sequence[int]], Awaitable[Sequence[int]]],
    ) -> None:
        self._cache = cache
        self._segment = segment
        self._block_bytes = block_bytes
        self._sums = sums
        self.match = cache.match
        self.num_saved = cache.num_saved

    async def save(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, tenant: str
    ) -> int:
        sums = await self._sums(block_ids)
        offsets = [block_id * self._block_bytes for block_id in block_ids]
        return await self._cache.save(
            chain, self._segment, offsets, sums, first, tenant, priority=Priority.BACKGROUND
        )

    async def load(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, stripes: Stripes | None
    ) -> int:
        size = self._block_bytes
        offsets = [block_id * size for block_id in block_ids]

        async def sums(landed: Sequence[int]) -> Sequence[int]:
            return await self._sums([offset // size for offset in landed])

        return await self._cache.load(chain, self._segment, offsets, first, sums=sums, stripes=stripes)


def part_bytes(block: memoryview, layout: KvLayout, part: KvPart) -> memoryview:
    """Return a part of a whole block, in the order in which a rank that has only that has it."""
    columns = part_columns(np.frombuffer(block, np.uint8)[None], layout, part)
    return np.concatenate([column[0] for column in columns]).data if columns else memoryview(b"")


def _added(sums: Sequence[int]) -> int:
    return sum(sums) & (1 << 64) - 1


def _arrived_elsewhere(num_parts: int) -> None:
    """Do nothing: steps of another rank wait in its own process."""


class ShardMover:
    """`BlockMover` between the shards of one node and its own store. Belongs to the event loop.

    Args:
        own: How the ranks reach the store's memory: this process.
        kind: Of this node's checksums.
    """

    def __init__(self, kv: NodeKv, store: Store, own: PeerDescriptor, kind: str) -> None:
        self._kv = kv
        self._store = store
        self._own = own
        self._adds_up = kind == DEVICE_CHECKSUM_KIND
        self._sum_of = checksum_of_kind(kind)

    async def match(self, chain: Sequence[BlockHash]) -> int:
        return self._store.match(chain).num_blocks

    num_saved = match

    async def save(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, tenant: str
    ) -> int:
        try:
            reserved = self._store.reserve(chain, tenant)
        except CapacityError:
            return 0
        try:
            if reserved.grant is None or min(reserved.missing) < first:
                return 0
            missing = [block_ids[index - first] for index in reserved.missing]
            return await self._store.commit(reserved.ticket, await self._written(reserved.grant, missing))
        finally:
            await self._store.abort(reserved.ticket)  # of no effect after a commit

    async def load(
        self, chain: Sequence[BlockHash], block_ids: Sequence[int], first: int, stripes: Stripes | None
    ) -> int:
        leased = await self._store.lease(chain, first)
        try:
            if leased.grant is None:
                return 0
            count = await self._read(leased.grant, leased.checksums, block_ids, stripes)
        finally:
            await self._store.release(leased.ticket)
        if count < len(leased.checksums):
            await self._store.report(chain[first + count])
        return count

    # --- each rank its part ---------------------------------------------------------------

    async def _written(self, grant: Grant, block_ids: Sequence[int]) -> list[int | None]:
        """Copy blocks to where they were reserved; return their checksums, None for what came wrong."""

        async def write(shard: KvShard) -> list[int]:
            share = self._share(shard)
            sums = await shard.sums(block_ids, share)
            await shard.write(self._move(share, grant, block_ids, is_background=True))
            return sums

        made = await self._by_each(write)
        if self._adds_up:
            return [_added(of_parts) for of_parts in zip(*made, strict=True)]
        sealed = await asyncio.to_thread(self._sealed, grant, made)
        if None in sealed:
            event(log, "blocks did not arrive in the store as they were made", level=logging.WARNING)
        return sealed

    async def _read(
        self, grant: Grant, checksums: Sequence[int], block_ids: Sequence[int], stripes: Stripes | None
    ) -> int:
        """Copy leased blocks to `block_ids`; return how many leading ones are right.

        With `stripes`, each rank's layers come in parts of its own, and its steps may wait for them;
        whoever gave the stripes is notified of rank 0's, when the others have begun.
        """
        block_ids = block_ids[: len(grant.offsets)]

        async def read(shard: KvShard) -> list[int]:
            move = self._move(shard.part, grant, block_ids)
            if stripes is None:
                await shard.read(move)
            else:
                is_own = shard is self._kv.shards[0]
                await shard.read(move, stripes.on_arrived if is_own else _arrived_elsewhere)
            return await shard.sums(block_ids, shard.part)

        if self._adds_up:
            return num_equal(await self._added_up(block_ids, await self._by_each(read)), checksums)
        expecting = asyncio.create_task(asyncio.to_thread(self._expected, grant, checksums))
        try:
            landed = await self._by_each(read)
        finally:
            # A lease covers what the thread reads, too.
            await uninterrupted(asyncio.wait([expecting]))
        return num_equal([list(of_parts) for of_parts in zip(*landed, strict=True)], expecting.result())

    async def _by_each(self, work: Callable[[KvShard], Coroutine[None, None, list[int]]]) -> list[list[int]]:
        """Return what `work` does for each shard; when it fails for one, the others have ended."""
        # Rank 0's last: what it reports as arrived is reported when all have begun.
        done = await together(work(shard) for shard in reversed(self._kv.shards))
        return done[::-1]

    async def _added_up(self, block_ids: Sequence[int], landed: list[list[int]]) -> list[int | None]:
        """Return the sums of whole blocks from those of what each rank has.

        None: two ranks have different bytes where both have all, as of what has no heads."""
        shards = self._kv.shards
        if all(self._share(shard) == shard.part for shard in shards):
            return [_added(of_parts) for of_parts in zip(*landed, strict=True)]

        async def with_heads(shard: KvShard) -> list[int]:
            return await shard.sums(block_ids, replace(shard.part, has_headless=False))

        headed = await self._by_each(with_heads)
        found: list[int | None] = []
        for of_all, of_heads in zip(zip(*landed, strict=True), zip(*headed, strict=True), strict=True):
            of_layers: dict[int, set[int]] = {}
            for shard, one, other in zip(shards, of_all, of_heads, strict=True):
                of_layers.setdefault(shard.part.first_layer, set()).add(_added((one, -other)))
            is_one = all(len(values) == 1 for values in of_layers.values())
            found.append(_added([*of_heads, *map(sum, of_layers.values())]) if is_one else None)
        return found

    def _share(self, shard: KvShard) -> KvPart:
        """Return what a rank puts into a whole block: of what each has, one alone."""
        share = shard.part.share_for(self._kv.whole)
        assert share is not None, "a rank has a part of the whole"
        return share

    def _move(
        self, part: KvPart, grant: Grant, block_ids: Sequence[int], is_background: bool = False
    ) -> BlockMove:
        return BlockMove(
            peer=self._own,
            grant=grant,
            block_ids=tuple(block_ids),
            offsets=grant.offsets,
            peer_part=self._kv.whole,
            part=part,
            deadline_s=grant.expires_in_s,
            is_background=is_background,
        )

    # --- the whole of it, in the pool, on a thread ----------------------------------------

    def _sealed(self, grant: Grant, made: list[list[int]]) -> list[int | None]:
        sums: list[int | None] = []
        shares = [self._share(shard) for shard in self._kv.shards]
        for offset, of_parts in zip(grant.offsets, zip(*made, strict=True), strict=True):
            whole = self._sum_of(self._block(offset))
            sums.append(whole if self._part_sums(offset, shares) == list(of_parts) else None)
        return sums

    def _expected(self, grant: Grant, checksums: Sequence[int]) -> list[list[int] | None]:
        """Return the sums of each block's parts; None: the block is not what the record says."""
        sums: list[list[int] | None] = []
        parts = [shard.part for shard in self._kv.shards]
        for offset, checksum in zip(grant.offsets, checksums, strict=True):
            of_parts = self._part_sums(offset, parts)
            sums.append(of_parts if self._sum_of(self._block(offset)) == checksum else None)
        return sums

    def _part_sums(self, offset: int, parts: list[KvPart]) -> list[int]:
        block, layout = self._block(offset), self._kv.layout
        return [self._sum_of(part_bytes(block, layout, part)) for part in parts]

    def _block(self, offset: int) -> memoryview:
        return self._store.segment.memory[offset : offset + self._kv.layout.block_bytes]
