"""Lends blocks of this node to another node's prefill, which reads them itself.

The other end is `prefill_node/prefix_loader.py`. Every node lends, whatever its role: what a decode node
generated is the prefix of a conversation's next turn. The blocks are held, so that they
stay what they are, and may be read until `Release`, the deadline, or the end of the
conductor's stream. How they are lent is the cache's (`own_cache.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.messages import FromNode, Lend
from base.request_tasks import RequestTasks
from node.own_cache import OwnCache


class Lender:
    """Answers `Lend` messages. Belongs to the event loop."""

    def __init__(
        self, own: OwnCache | None, group: asyncio.TaskGroup, send: Callable[[FromNode], None]
    ) -> None:
        """Begin without lent blocks. `own`: None where this node cannot lend."""
        self._own = own
        self._send = send
        self.tasks = RequestTasks(group, send)

    def lend(self, message: Lend) -> None:
        self.tasks.start(message.request_id, self._lend(message))

    async def _lend(self, message: Lend) -> None:
        if self._own is None:
            raise LostError("this node has several ranks and no store, and lends nothing")
        await self._own.lend(message, self._send)
