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
from base.request_tasks import RequestTasks
from base.uninterrupted import uninterrupted
from engine.block_sums import block_sums
from kvstore.lending import lend_stored
from kvstore.store import Store
from prefill_node.prefix_loader import OwnCache


class Lender:
    """Answers `Lend` messages. Belongs to the event loop."""

    def __init__(
        self,
        own: OwnCache,
        group: asyncio.TaskGroup,
        send: Callable[[FromNode], None],
        store: Store | None = None,
    ) -> None:
        """Begin without lent blocks."""
        self._own = own
        self._send = send
        self._store = store
        self.tasks = RequestTasks(group, send)

    def lend(self, message: Lend) -> None:
        self.tasks.start(message.request_id, self._lend(message))

    async def _lend(self, message: Lend) -> None:
        own = self._own
        own.require_whole()
        block_ids = own.pool.match(message.chain)
        if self._store is not None and self._store.match(message.chain).num_blocks > len(block_ids):
            own.pool.release(block_ids)
            await lend_stored(self._store, message, self._send)
            return
        try:
            wanted = block_ids[message.first_block :]
            if not wanted:
                raise LostError("the blocks were evicted")
            sums = await block_sums(own.cache, wanted)
            layout = own.cache.layout
            offsets = [layout.offset(block_id) for block_id in wanted]
            grant = own.agent.grant(own.segment, offsets, layout.block_bytes, Operation.READ, message.lease_s)
            try:
                self._send(Lent(message.request_id, grant, tuple(sums)))
                await asyncio.sleep(message.lease_s)
            finally:
                await uninterrupted(own.agent.revoke(grant))
        finally:
            own.pool.release(block_ids)
