"""Writes a sequence's finished blocks into the reservation on its decode node.

A block is written as soon as its last token is computed, while later chunks compute;
the last, partial block when the prompt is done. Where the engine tells when which layers of
a chunk are computed, they are written group by group while later layers compute: what is
left after the last layer is one group. Checksums are made here, where the KV was made. A
block is held while it is read: preemption may take it from the sequence, and must not hand
it to another before the write is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from base.errors import ProtocolError
from base.messages import Prefill
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from engine.step import LaunchedChunk, LayerGroup
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.segment import Segment


class KvSender:
    """The hand-off of one sequence. Belongs to the event loop."""

    def __init__(
        self, agent: TransferAgent, pool: BlockPool, cache: PagedCache, segment: Segment, message: Prefill
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._cache = cache
        self._segment = segment
        self._message = message
        self._num_sent = message.first_block
        self._checksums: dict[int, int] = {}

    @property
    def checksums(self) -> tuple[int, ...]:
        """One for each block written, in the order of the sequence."""
        return tuple(self._checksums[block] for block in sorted(self._checksums))

    def send_launched(self, writes: asyncio.TaskGroup, chunk: LaunchedChunk) -> None:
        """Start writing what a chunk will have finished, by groups of layers as they are computed.

        What was finished before it, a prefix that was matched, need not wait for anything.
        """
        entry = chunk.entry
        self.send_finished(writes, entry.block_table, entry.start)
        if chunk.groups:
            self.send_finished(writes, entry.block_table, entry.context_len, chunk.groups)

    def send_finished(
        self,
        writes: asyncio.TaskGroup,
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
        layout = self._cache.layout
        is_done = num_tokens >= len(self._message.work.token_ids)
        num_finished = layout.num_blocks(num_tokens) if is_done else num_tokens // layout.block_size
        if len(block_table) < num_finished:
            return  # preempted since: it is computed again, and sent then
        if num_finished > self._num_sent:
            first, self._num_sent = self._num_sent, num_finished
            block_ids = list(block_table[first:num_finished])
            write = writes.create_task(self._write(first, block_ids, groups))
            # Not in the task itself: one that is cancelled before it begins runs no `finally`.
            self._pool.hold(block_ids)
            write.add_done_callback(lambda _: self._pool.release(block_ids))

    async def _write(self, first: int, block_ids: list[int], groups: tuple[LayerGroup, ...]) -> None:
        for group in groups:
            await asyncio.to_thread(group.wait)
            if group is not groups[-1]:
                await self._send(first, block_ids, group.first, group.count)
        rest = groups[-1].first if groups else 0
        async with asyncio.TaskGroup() as both:
            # Of whole blocks, once: it takes less than the last group's way.
            sums = both.create_task(block_sums(self._cache, block_ids))
            both.create_task(self._send(first, block_ids, rest, self._cache.layout.num_layers - rest))
        self._checksums.update(enumerate(sums.result(), first))

    async def _send(self, first: int, block_ids: list[int], layer: int, num_layers: int) -> None:
        layout, grant = self._cache.layout, self._message.grant
        if grant is None:
            raise ProtocolError("blocks are to be written, and no grant was given")
        skipped = first - self._message.first_block
        if skipped + len(block_ids) > len(grant.offsets):
            raise ProtocolError("fewer blocks were granted than are to be written")
        targets = np.array(grant.offsets[skipped : skipped + len(block_ids)], np.int64)
        await self._agent.write(
            self._message.target,
            grant,
            batch_of(
                self._segment,
                source_offsets=[layout.offset(block_id, layer) for block_id in block_ids],
                target_offsets=targets + layout.offset(0, layer),
                length=num_layers * layout.layer_bytes,
            ),
            deadline_s=self._message.work.deadline_s,
        )
