"""Copies blocks of other nodes into this one's cache before a request asks for them.

The conductor decides which (`conductor/placing/replicas.py`). What comes is published like any block
that was loaded or computed, and nothing holds it: a replica that is not read is evicted in its
turn, or earlier where the conductor says that it went cold (`Forget`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.messages import Fetch, Fetched, FromNode
from base.request_tasks import RequestTasks
from node.own_cache import OwnCache
from prefill_node.prefix_loader import load_missing


class Fetcher:
    """Answers `Fetch` messages. Belongs to the event loop."""

    def __init__(
        self, own: OwnCache | None, group: asyncio.TaskGroup, send: Callable[[FromNode], None]
    ) -> None:
        """Begin without work. `own`: None where this node cannot take in what others lend."""
        self._own = own
        self._send = send
        self.tasks = RequestTasks(group, send)

    def fetch(self, message: Fetch) -> None:
        self.tasks.start(message.request_id, self._fetch(message))

    async def _fetch(self, message: Fetch) -> None:
        if self._own is None:
            raise LostError("this node has several ranks and no store, and fetches nothing")
        pool = self._own.pool
        held = pool.match(message.chain)
        try:
            await load_missing(pool, message.chain, self._own.lent(message.source), held)
            self._send(Fetched(message.request_id, len(held)))
        finally:
            pool.release(held)
