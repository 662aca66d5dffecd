"""Requests that wait to be placed, each with a task: `placing/placement_queue.py` says who is next.

While the conductor's process stood still no lost node could be back: that does not count as waiting for
a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.clock import Clock
from base.errors import ServeError
from base.request import RequestId
from conductor.placing.fair_queue import Waiting
from conductor.placing.placement_queue import PlacementQueue

STOOD_S = 1.0
"""That a wait ends late, at least, where the process stood still."""

Try = Callable[[float], bool]
"""Places a request and returns True, if so many predicted seconds of others before it are none;
False: it has to wait. A ServeError: waiting is of no use."""


class _Ticket:
    __slots__ = ("_attempt", "turn")

    def __init__(self, attempt: Try) -> None:
        self._attempt = attempt
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def try_to_place(self, ahead_s: float) -> bool:
        return self._attempt(ahead_s)

    def ended(self, error: ServeError | None) -> None:
        if self.turn.done():
            return
        if error is None:
            self.turn.set_result(None)
        else:
            self.turn.set_exception(error)


class WaitingRoom:
    """Belongs to the event loop."""

    def __init__(
        self,
        max_waiting: int,
        role_wait_s: float,
        missing_role: Callable[[], str | None],
        num_prefill_nodes: Callable[[], int],
        clock: Clock,
    ) -> None:
        """Begin with nobody waiting; the arguments are those of `PlacementQueue`."""
        self._clock = clock
        self._queue = PlacementQueue(max_waiting, role_wait_s, missing_role, num_prefill_nodes, clock.now_s())

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of prefill of those who wait."""
        return self._queue.waiting_s

    async def placed(self, item: Waiting, attempt: Try, first_token_by_s: float, give_up_at_s: float) -> None:
        """Return when `attempt` has placed the request, or raise what it raised.

        Args:
            item: The request.
            attempt: Called with no await between two requests, so that each sees the last.
            first_token_by_s: By the request's SLO, on the clock; infinity: there is none.
            give_up_at_s: The request's end, on the clock.

        Raises:
            RejectedError: too many wait, and it is the one to go.
            SloUnreachableError: its first token was due before it could be placed.
            UnavailableError: a role had no node for too long.
            DeadlineError: its time ran out.
        """
        ticket = _Ticket(attempt)
        try:
            if self._queue.join(item, ticket, self._clock.now_s(), first_token_by_s, give_up_at_s):
                await self._turn(ticket, item.request_id)
            if ticket.turn.done():
                ticket.turn.result()
        finally:
            self._queue.leave(item.request_id)
            del ticket  # it may hold the error that leaves this frame, which the error holds

    def pump(self) -> None:
        """Try who waits, in order, until one has to wait on."""
        self._queue.pump(self._clock.now_s())

    async def _turn(self, ticket: _Ticket, request_id: RequestId) -> None:
        while not ticket.turn.done():
            now_s = self._clock.now_s()
            next_s = self._queue.look_at_s(request_id, now_s)
            await asyncio.wait([ticket.turn], timeout=max(0.0, next_s - now_s))
            if ticket.turn.done():
                return
            now_s = self._clock.now_s()
            error = self._queue.overdue(request_id, now_s, has_stood=now_s > next_s + STOOD_S)
            if error is not None:
                raise error
