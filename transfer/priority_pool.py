"""Things that are lent out one at a time: what a request waits for goes before what nobody waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from transfer.batch import Priority

Item = TypeVar("Item")


class PriorityPool(Generic[Item]):
    """Owns some equal things. The event loop calls it."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._free = list(items)
        self._urgent: deque[asyncio.Future[Item]] = deque()
        self._background: deque[asyncio.Future[Item]] = deque()

    async def take(self, priority: Priority) -> Item:
        """Return one, or the next that is given back. Cancelled, nothing is taken."""
        if self._free:
            return self._free.pop()
        handed: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        (self._urgent if priority is Priority.FOREGROUND else self._background).append(handed)
        try:
            return await handed
        except asyncio.CancelledError:
            # Cancelled after it was handed over: it is somebody else's.
            if not handed.cancelled():
                self.give_back(handed.result())
            raise

    def give_back(self, item: Item) -> None:
        """Hand `item` to whoever is next."""
        while queue := self._urgent or self._background:
            handed = queue.popleft()
            if not handed.done():
                handed.set_result(item)
                return
        self._free.append(item)
