"""Writes a sequence's finished blocks into the reservation on its decode node.

A block is written as soon as its last token is computed, while later chunks compute;
the last, partial block when the prompt is done. Where the engine reports when which layers of
a chunk are computed, they are written group by group while later layers compute: what is
left after the last layer is one group. Each rank of the engine writes the layers and heads that
it has, from its own memory (`transfer/shard.py`). Checksums are made here, where the KV was made. A
block is held while it is read: preemption may take it from the sequence, and must not hand
it to another before the write is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from base.clock import Clock
from base.errors import LostError, ProtocolError, TransferFailedError
from base.grants import RankGrant
from base.kv_layout import KvPart
from base.messages import Granted, PrefillTimes, Work
from base.request import RequestId
from base.together import Begin, together
from engine.block_pool import BlockPool
from engine.step import LaunchedChunk, LayerGroup
from transfer.shard import BlockMove, KvShard, NodeKv


class PrefillObserver:
    """Is notified of a node's prefills where they happen, in the event loop; raises nothing."""

    def wrote(self, part: KvPart, num_blocks: int, begun_at_s: float) -> None:
        """Note that the rank which has `part` of each block wrote some of it to a decode node's rank."""

    def prefilled(self, request_id: RequestId, times: PrefillTimes) -> None:
        """Note where a request's seconds went, which has its first token now."""


@dataclass(frozen=True, slots=True)
class _Path:
    """The path from one of our ranks to one of the decode node's."""

    shard: KvShard
    target: RankGrant
    part: KvPart
    """The layers and heads that both ranks have, and what has no heads on one path to each rank."""


class Destination:
    """Where a sequence's blocks go, which its decode node says while the prompt is computed."""

    def __init__(self) -> None:
        self._is_known = asyncio.Event()
        self._granted: Granted | None = None
        self.num_waiting = 0
        """Writes that hold their blocks until it is known."""

    def granted(self, message: Granted) -> None:
        """Note what the decode node has set aside; again: no effect."""
        self._granted = self._granted or message
        self._is_known.set()

    def give_up(self) -> None:
        """Let nobody wait for it any longer."""
        self._is_known.set()

    async def known(self) -> Granted:
        """Return what was set aside, once it is.

        Raises:
            TransferFailedError: it was given up.
        """
        self.num_waiting += 1
        try:
            await self._is_known.wait()
        finally:
            self.num_waiting -= 1
        if self._granted is None:
            raise TransferFailedError("the decode node sets no blocks aside, and others wait for ours")
        return self._granted


class KvSender:
    """The hand-off of one sequence. Belongs to the event loop."""

    def __init__(
        self,
        kv: NodeKv,
        pool: BlockPool,
        work: Work,
        destination: Destination,
        clock: Clock,
        observers: Sequence[PrefillObserver] = (),
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._work = work
        self._destination = destination
        self._clock = clock
        self._observers = observers
        self._num_sent = 0
        self._begun_at_s: float | None = None
        self._ended_at_s = 0.0
        self._checksums: dict[tuple[KvPart, int], int] = {}
        self._first_block = 0
        self._paths: list[_Path] = []

    @property
    def parts(self) -> tuple[KvPart, ...]:
        """The parts of blocks that the checksums are of, where they are not whole blocks."""
        parts = tuple(path.part for path in self._paths)
        return parts if len(parts) > 1 else ()

    @property
    def transfer_s(self) -> float:
        """Seconds from the beginning of the first write to the end of the last; 0: nothing was written."""
        return 0.0 if self._begun_at_s is None else self._ended_at_s - self._begun_at_s

    @property
    def checksums(self) -> tuple[int, ...]:
        """One for each block written, in the order of the sequence, for each part in turn."""
        blocks = range(self._first_block, self._num_sent)
        return tuple(self._checksums[path.part, block] for path in self._paths for block in blocks)

    def send_launched(self, begin: Begin, chunk: LaunchedChunk) -> None:
        """Start writing what a chunk will have finished, by groups of layers as they are computed.

        What was finished before it, a prefix that was matched, need not wait for anything; one that is still
        being loaded is there when the chunk's layers are.
        """
        entry = chunk.entry
        if entry.sequence.block_table[: len(entry.block_table)] != list(entry.block_table):
            return  # preempted since: it is computed again, and sent then
        if entry.sequence.arrivals is None:
            # Earlier chunks may be under way too: they were sent as they were launched, or are with this one.
            computed = min(entry.start, entry.sequence.num_computed_tokens)
            self.send_finished(begin, entry.block_table, computed)
        if chunk.groups:
            self.send_finished(begin, entry.block_table, entry.context_len, chunk.groups)

    def send_finished(
        self,
        begin: Begin,
        block_table: Sequence[int],
        num_tokens: int,
        groups: tuple[LayerGroup, ...] = (),
    ) -> None:
        """Start writing the blocks that `num_tokens` computed tokens have finished.

        The last block counts as finished when all tokens of the work are computed.

        Args:
            block_table: The sequence's.
            groups: All layers, with when they are computed; empty: they are.
        """
        layout = self._kv.layout
        is_done = num_tokens >= len(self._work.token_ids)
        num_finished = layout.num_blocks(num_tokens) if is_done else num_tokens // layout.block_size
        if len(block_table) < num_finished:
            return  # preempted since: it is computed again, and sent then
        if num_finished > self._num_sent:
            first, self._num_sent = self._num_sent, num_finished
            block_ids = list(block_table[first:num_finished])
            write = begin(self._write(first, block_ids, groups))
            # Not in the task itself: one that is cancelled before it begins runs no `finally`.
            self._pool.hold(block_ids)
            write.add_done_callback(lambda _: self._pool.release(block_ids))

    async def _write(self, first: int, block_ids: list[int], groups: tuple[LayerGroup, ...]) -> None:
        self._go_to(await self._destination.known())
        if (num_there := self._first_block - first) > 0:
            first, block_ids = self._first_block, block_ids[num_there:]
        if not block_ids:
            return
        if not self._paths:
            raise ProtocolError("blocks are to be written, and no grant was given")
        whole = self._kv.whole
        if not groups:
            await self._write_layers(first, block_ids, whole)
        for group in groups:
            try:
                await asyncio.to_thread(group.wait)
            except RuntimeError as error:
                raise LostError(f"the device failed: {error}") from error
            layers = replace(whole, first_layer=group.first, num_layers=group.count)
            await self._write_layers(first, block_ids, layers)

    def _go_to(self, granted: Granted) -> None:
        """Find the paths to what was set aside, once."""
        if self._paths:
            return
        self._first_block, targets = granted.first_block, granted.ranks
        if granted.grant is not None:
            targets = (RankGrant(granted.target, self._kv.whole, granted.grant),)
        self._paths = [
            _Path(shard, target, part)
            for shard in self._kv.shards
            for target in targets
            if (part := shard.part.share_for(target.part))
        ]

    async def _write_layers(self, first: int, block_ids: list[int], layers: KvPart) -> None:
        work: list[Coroutine[Any, Any, None]] = []
        for path in self._paths:
            part = path.part.overlap(layers)
            if part is None:
                continue
            if part.first_layer + part.num_layers == path.part.first_layer + path.part.num_layers:
                # Of all that goes on this path, once. Before the write: a thread does it, and
                # what launches a write does not.
                work.append(self._sum(path, first, block_ids))
            work.append(self._send(path, first, block_ids, part))
        await together(work)

    async def _sum(self, path: _Path, first: int, block_ids: list[int]) -> None:
        sums = await path.shard.sums(block_ids, path.part)
        self._checksums |= {(path.part, block): value for block, value in enumerate(sums, first)}

    async def _send(self, path: _Path, first: int, block_ids: list[int], part: KvPart) -> None:
        grant = path.target.grant
        skipped = first - self._first_block
        if skipped + len(block_ids) > len(grant.offsets):
            raise ProtocolError("fewer blocks were granted than are to be written")
        move = BlockMove(
            peer=path.target.peer,
            grant=grant,
            block_ids=tuple(block_ids),
            offsets=grant.offsets[skipped : skipped + len(block_ids)],
            peer_part=path.target.part,
            part=part,
            deadline_s=self._work.deadline_s,
        )
        begun_at_s = self._clock.now_s()
        if self._begun_at_s is None:
            self._begun_at_s = begun_at_s
        await path.shard.write(move)
        self._ended_at_s = self._clock.now_s()
        for observer in self._observers:
            observer.wrote(path.shard.part, len(block_ids), begun_at_s)
