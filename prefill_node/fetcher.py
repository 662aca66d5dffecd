"""Copies blocks of other nodes into this one's cache before a request asks for them.

The conductor decides which (`conductor/replicas.py`). What comes is published like any block
that was loaded or computed, and nothing holds it: a replica that is not read is evicted in its
turn, or earlier where the conductor says that it went cold (`Forget`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.messages import Fetch, Fetched, FromNode
from base.request import RequestId
from base.request_tasks import RequestTasks
from engine.block_pool import BlockPool
from engine.paged_cache import PagedCache
from prefill_node.prefix_loader import LentPrefix, load_missing
from transfer.agent import TransferAgent
from transfer.segment import Segment


class Fetcher:
    """Answers `Fetch` messages. Belongs to the event loop."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PagedCache,
        segment: Segment,
        agent: TransferAgent,
        group: asyncio.TaskGroup,
        send: Callable[[FromNode], None],
        is_whole: bool = True,
    ) -> None:
        """Begin without work.

        Args:
            is_whole: Whether `cache` has all of a block; otherwise nothing is fetched, as `Lender`.
        """
        self._pool = pool
        self._cache = cache
        self._segment = segment
        self._agent = agent
        self._send = send
        self._is_whole = is_whole
        self._tasks = RequestTasks(group, send)

    def fetch(self, message: Fetch) -> None:
        self._tasks.start(message.request_id, self._fetch(message))

    def release(self, request_id: RequestId) -> None:
        self._tasks.end(request_id)

    def release_all(self) -> None:
        self._tasks.end_all()

    async def idle(self) -> None:
        """Return when nothing is being fetched."""
        await self._tasks.idle()

    async def _fetch(self, message: Fetch) -> None:
        if not self._is_whole:
            raise LostError("the blocks of this node are with several ranks, and are not fetched")
        held = self._pool.match(message.chain)
        try:
            source = LentPrefix(self._agent, self._segment, self._cache, message.source)
            await load_missing(self._pool, message.chain, source, held)
            self._send(Fetched(message.request_id, len(held)))
        finally:
            self._pool.release(held)
