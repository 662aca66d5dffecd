"""Lends blocks of this node's cache to another node's prefill, which reads them itself.

The other end is `prefix_loader.py`. Every node lends, whatever its role: what a decode node
generated is the prefix of a conversation's next turn. What the node's store has of a chain is
lent from there where that is more. The blocks are held, so that they
stay what they are, and may be read until `Release`, the deadline, or the end of the
conductor's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.grants import Operation
from base.messages import FromNode, Lend, Lent
from base.request import RequestId
from base.request_tasks import RequestTasks
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from kvstore.lending import lend_stored
from kvstore.store import Store
from transfer.agent import TransferAgent
from transfer.segment import Segment


class Lender:
    """Answers `Lend` messages. Belongs to the event loop."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        segment: Segment,
        agent: TransferAgent,
        group: asyncio.TaskGroup,
        send: Callable[[FromNode], None],
        store: Store | None = None,
        is_whole: bool = True,
    ) -> None:
        """Begin without lent blocks.

        Args:
            is_whole: Whether `cache` has all of a block. If other ranks have the rest, nothing
                is lent: what reads a part from each is not built.
        """
        self._pool = pool
        self._cache = cache
        self._segment = segment
        self._agent = agent
        self._send = send
        self._store = store
        self._is_whole = is_whole
        self._tasks = RequestTasks(group, send)

    def lend(self, message: Lend) -> None:
        self._tasks.start(message.request_id, self._lend(message))

    def release(self, request_id: RequestId) -> None:
        self._tasks.end(request_id)

    def release_all(self) -> None:
        self._tasks.end_all()

    async def idle(self) -> None:
        """Return when nothing is lent."""
        await self._tasks.idle()

    async def _lend(self, message: Lend) -> None:
        if not self._is_whole:
            raise LostError("the blocks of this node are with several ranks, and are not lent")
        block_ids = self._pool.match(message.chain)
        if self._store is not None and self._store.match(message.chain).num_blocks > len(block_ids):
            self._pool.release(block_ids)
            await lend_stored(self._store, message, self._send)
            return
        try:
            wanted = block_ids[message.first_block :]
            if not wanted:
                raise LostError("the blocks were evicted")
            sums = await block_sums(self._cache, wanted)
            layout = self._cache.layout
            offsets = [layout.offset(block_id) for block_id in wanted]
            grant = self._agent.grant(
                self._segment, offsets, layout.block_bytes, Operation.READ, message.lease_s
            )
            try:
                self._send(Lent(message.request_id, grant, tuple(sums)))
                await asyncio.sleep(message.lease_s)
            finally:
                await uninterrupted(self._agent.revoke(grant))
        finally:
            self._pool.release(block_ids)
