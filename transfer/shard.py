"""A shard: one rank's share of a node's KV, and how its blocks reach other nodes.

A node of one rank has one shard with everything. A node of several has one for each rank,
with some of the layers or heads, in memory of the rank's own, which an agent of the rank's
own process sends from: no KV goes through another rank. All ranks number blocks alike, so a
block id names the same tokens in each shard.

Whoever moves KV holds the blocks meanwhile, and asks shards; where a shard is, here or in
another process (`node/remote_shard.py`), makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from base.grants import Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvLayout, KvPart, all_of, part_runs
from transfer.agent import TransferAgent
from transfer.batch import Pieces, Priority, pieces_of
from transfer.owned.ranges import Offsets
from transfer.owned.segment import Segment


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Blocks of a shard, and where the same blocks are in a peer's segment."""

    peer: PeerDescriptor
    grant: Grant
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where each block begins in the peer's segment."""
    peer_part: KvPart
    """The part of a block that the peer's segment has."""
    part: KvPart
    """The part that is moved: both have it."""
    deadline_s: float
    is_background: bool = False
    """Whether no request waits for it."""


OnArrived = Callable[[int], None]


class KvShard(Protocol):
    """One rank's share of the KV. Belongs to the event loop."""

    @property
    def part(self) -> KvPart:
        """The part of each block that it has."""
        ...

    async def write(self, move: BlockMove) -> None:
        """Copy a part of blocks to the peer; raises as `TransferAgent.write`, and LostError where
        the rank has ended. When it has returned or raised, the blocks are not read any more."""
        ...

    async def read(self, move: BlockMove, on_arrived: OnArrived | None = None) -> None:
        """Copy a part of blocks from the peer; otherwise as `write`.

        Args:
            on_arrived: Called, for blocks that steps read while they come, with how many of the leading
                parts (layers after layers) are there. A shard in another process calls nobody here: steps
                there know. Such a read has begun there before the next message of rank 0 is handled.
        """
        ...

    async def sums(self, block_ids: Sequence[int], part: KvPart) -> list[int]:
        """Return the checksum of that part of each block, which this shard has."""
        ...

    def sums_in_order(self, block_ids: Sequence[int], part: KvPart) -> Awaitable[list[int]] | None:
        """Return the checksums to be waited for, of what the blocks are now: a step that is launched
        after this call does not disturb them. None: this shard cannot, and `sums` has to end first."""
        ...

    async def grant(self, block_ids: Sequence[int], lease_s: float) -> RankGrant:
        """Allow peers to write its part of blocks; raises as `TransferAgent.grant`.

        Not to be cancelled: nobody else knows of what is granted.
        """
        ...

    async def revoke(self, grant: Grant) -> None:
        """Refuse what was granted, and return when nothing done under it is in flight."""
        ...


@dataclass(frozen=True, slots=True)
class NodeKv:
    """The KV of one engine, whatever ranks it is with."""

    layout: KvLayout
    """Layout of all shards together."""
    shards: tuple[KvShard, ...]

    @property
    def whole(self) -> KvPart:
        return all_of(self.layout)


Sums = Callable[[Sequence[int], KvPart], Awaitable[list[int]]]
SumsInOrder = Callable[[Sequence[int], KvPart], Awaitable[list[int]] | None]


class LocalShard:
    """The shard of this process.

    Args:
        layout: Layout of its own blocks, which begin at the start of `segment`.
        sums, sums_in_order: The checksums of a part of blocks, counted from the shard's first layer
            and head.
        layer_parts: How many layers each part has in which blocks come that steps read meanwhile.
    """

    def __init__(
        self,
        part: KvPart,
        layout: KvLayout,
        segment: Segment,
        agent: TransferAgent,
        sums: Sums,
        sums_in_order: SumsInOrder = lambda block_ids, part: None,
        layer_parts: Sequence[int] = (),
    ) -> None:
        self.part = part
        self._layout = layout
        self._segment = segment
        self._agent = agent
        self._sums = sums
        self._sums_in_order = sums_in_order
        self._layer_parts = tuple(layer_parts)

    async def write(self, move: BlockMove) -> None:
        await self._agent.write(move.peer, move.grant, self._pieces(move), move.deadline_s, _priority(move))

    async def read(self, move: BlockMove, on_arrived: OnArrived | None = None) -> None:
        if on_arrived is None:
            await self._read(move)
            return
        assert move.part == self.part, "all that the shard has comes in parts"
        begins = accumulate(self._layer_parts, initial=self.part.first_layer)
        for index, (first, count) in enumerate(zip(begins, self._layer_parts, strict=False), 1):
            await self._read(replace(move, part=replace(self.part, first_layer=first, num_layers=count)))
            on_arrived(index)

    async def _read(self, move: BlockMove) -> None:
        await self._agent.read(move.peer, move.grant, self._pieces(move), move.deadline_s, _priority(move))

    async def sums(self, block_ids: Sequence[int], part: KvPart) -> list[int]:
        return await self._sums(block_ids, part.within(self.part))

    def sums_in_order(self, block_ids: Sequence[int], part: KvPart) -> Awaitable[list[int]] | None:
        return self._sums_in_order(block_ids, part.within(self.part))

    async def grant(self, block_ids: Sequence[int], lease_s: float) -> RankGrant:
        offsets = [self._layout.offset(block_id) for block_id in block_ids]
        granted = self._agent.grant(
            self._segment, offsets, self._layout.block_bytes, Operation.WRITE, lease_s
        )
        return RankGrant(self._agent.descriptor, self.part, granted)

    async def revoke(self, grant: Grant) -> None:
        await self._agent.revoke(grant)

    def _pieces(self, move: BlockMove) -> Pieces:
        """Return the runs of bytes that the blocks are, here and at the peer."""
        runs = part_runs(self._layout, move.part, self.part, move.peer_part)
        starts = np.array(move.block_ids, np.int64) * self._layout.block_bytes
        ours = starts[:, None] + np.array(runs.source_offsets, np.int64)
        theirs = np.array(move.offsets, np.int64)[:, None] + np.array(runs.target_offsets, np.int64)
        lengths: int | Offsets = runs.lengths[0] if runs.are_alike else np.tile(runs.lengths, len(starts))
        return pieces_of(self._segment, ours.ravel(), theirs.ravel(), lengths)


def _priority(move: BlockMove) -> Priority:
    return Priority.BACKGROUND if move.is_background else Priority.FOREGROUND
