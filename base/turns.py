"""Turns of the event loop, shared out: of work that clients ask for, only so much in each.

A node sends all its sequences' tokens in one message, and a call of 128 choices begins them all when its
prompt is computed: every task of theirs wakes in the same turn of the loop, and what else the process serves
waits for all of them. So who is about to work says how much it is, and where the turn has had enough, waits
for a later one, in the order of asking. Nobody waits who asks for little while little is done.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURN_UNITS = 1_500
"""Some 10 ms."""


class TurnBudget:
    """The units that are left of the present turn. Owned by the event loop."""

    def __init__(self, turn_units: int = TURN_UNITS) -> None:
        self._turn_units = turn_units
        self._used = 0
        self._is_ending = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, units: int) -> bool:
        """Return whether `units` may be worked in this turn; if not, `later` is for them."""
        if self._waiting or (self._used and self._used + units > self._turn_units):
            return False
        self._used += units
        self._end_turn()
        return True

    def later(self, units: int) -> asyncio.Future[None]:
        """Return what is done in the turn in which `units` may be worked."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        self._end_turn()
        return turn

    def _end_turn(self) -> None:
        """Let the next turn begin after what the loop has to do in this one."""
        if not self._is_ending:
            self._is_ending = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begin a turn: wake those who wait, as many as it has room for, one at least."""
        self._used, self._is_ending = 0, False
        while self._waiting:
            units, turn = self._waiting[0]
            if self._used and self._used + units > self._turn_units:
                break
            self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                self._used += units
                turn.set_result(None)
        if self._used:
            self._end_turn()
