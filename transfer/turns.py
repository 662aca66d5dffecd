"""At most so many batches at a time; others wait, those that a request waits for first.

An `asyncio.Semaphore` would do but for the order, and takes a microsecond where nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from transfer.batch import Priority


class Turns:
    """Owns a number of turns. The event loop's."""

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._background: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a turn if one is free; return whether. Nobody waits while one is."""
        if not self._num_free:
            return False
        self._num_free -= 1
        return True

    async def wait(self, priority: Priority) -> None:
        """Take the next turn that is given back. Cancelled, nothing is taken."""
        turn = asyncio.get_running_loop().create_future()
        queue = self._urgent if priority is Priority.FOREGROUND else self._background
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # Cancelled after it was handed over: it is somebody else's.
            if not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn: whoever is next has it."""
        while queue := self._urgent or self._background:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
