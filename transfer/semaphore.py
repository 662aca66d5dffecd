"""A semaphore with two queues: what a request waits for goes before what nobody waits for.

An `asyncio.Semaphore` would do but for the order, and takes a microsecond where nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from transfer.batch import Priority


class PrioritySemaphore:
    """Owns a number of permits. The event loop calls it."""

    def __init__(self, num_permits: int) -> None:
        self._num_free = num_permits
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._background: deque[asyncio.Future[None]] = deque()

    def try_acquire(self) -> bool:
        """Take a permit if one is free; return whether. Nobody waits while one is."""
        if not self._num_free:
            return False
        self._num_free -= 1
        return True

    async def acquire(self, priority: Priority) -> None:
        """Take a permit, or the next that is released. Cancelled, nothing is taken."""
        if self.try_acquire():
            return
        permit = asyncio.get_running_loop().create_future()
        queue = self._urgent if priority is Priority.FOREGROUND else self._background
        queue.append(permit)
        try:
            await permit
        except asyncio.CancelledError:
            # Cancelled after it was handed over: it is somebody else's.
            if not permit.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give a permit back, to whoever is next."""
        while queue := self._urgent or self._background:
            permit = queue.popleft()
            if not permit.done():
                permit.set_result(None)
                return
        self._num_free += 1
