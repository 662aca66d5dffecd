"""Requests that wait to be placed: while the nodes have enough ahead of them, or a role has no node.

A node serves in order of arrival, so order among requests can be kept only by not sending
too many ahead. Who comes while nobody waits is tried at once; who cannot be placed yet waits,
and `pump` tries them in the order of `placing/fair_queue.py` whenever something changed: a prefill
ended, a request left, a node came, went or reported.

Waiting is bounded in number (one of the tenant with the most waiting is let go) and in time: by the
request's own bounds, and where no node of a role is left by `role_wait_s`, which is what a lost node needs
to be back. While the conductor's process stood still no node could be: that does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.clock import Clock
from base.errors import DeadlineError, RejectedError, ServeError, SloUnreachableError, UnavailableError
from base.request import RequestId
from conductor.placing.fair_queue import FairQueue, Waiting

STOOD_S = 1.0
"""That a wait ends late, at least, where the process stood still."""

Try = Callable[[float], bool]
"""Places a request and returns True, if so many predicted seconds of others before it are none;
False: it has to wait. A ServeError: waiting is of no use."""


class _Ticket:
    __slots__ = ("attempt", "item", "turn")

    def __init__(self, item: Waiting, attempt: Try) -> None:
        self.item = item
        self.attempt = attempt
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


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
        """Begin with nobody waiting.

        Args:
            max_waiting: At most; then one of the tenant with the most is let go.
            role_wait_s: For a role that has no node, at most.
            missing_role: Names a role that has no node; None: both have one.
            num_prefill_nodes: They share the work of those who wait.
        """
        self._queue = FairQueue(max_waiting)
        self._role_wait_s = role_wait_s
        self._missing_role = missing_role
        self._num_prefill_nodes = num_prefill_nodes
        self._clock = clock
        self._tickets: dict[RequestId, _Ticket] = {}
        self._missing_since_s = clock.now_s()
        self._was_missing = True

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of prefill of those who wait."""
        return sum(ticket.item.cost_s for ticket in self._tickets.values())

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
        self._note_roles()
        ahead_s = self._queue.seconds_ahead(item) / max(1, self._num_prefill_nodes())
        if (ahead_s or not len(self._queue)) and attempt(ahead_s):
            return  # nobody was before it
        ticket = _Ticket(item, attempt)
        self._tickets[item.request_id] = ticket
        began_at_s = self._clock.now_s()
        try:
            self._push(item)
            if not ahead_s and len(self._queue) > 1:
                self.pump()
            await self._turn(ticket, began_at_s, first_token_by_s, give_up_at_s)
            ticket.turn.result()
        finally:
            del self._tickets[item.request_id]
            self._queue.drop(item.request_id)
            del ticket  # it may hold the error that leaves this frame, which the error holds

    def pump(self) -> None:
        """Try who waits, in order, until one has to wait on."""
        if not self._tickets:
            return
        self._note_roles()
        while (item := self._queue.first()) is not None:
            ticket = self._tickets[item.request_id]
            try:
                if not ticket.attempt(0.0):
                    return
            except ServeError as error:
                self._queue.drop(item.request_id)
                if not ticket.turn.done():
                    # Without its traceback, which holds this frame and so the ticket and so the error.
                    ticket.turn.set_exception(error.with_traceback(None))
                continue
            self._queue.take(item)
            if not ticket.turn.done():
                ticket.turn.set_result(None)

    def _push(self, item: Waiting) -> None:
        shed = self._queue.push(item)
        if shed is not None:
            error = RejectedError(f"{len(self._queue)} requests wait, the limit of scheduler.max_waiting")
            turn = self._tickets[shed.request_id].turn
            if not turn.done():
                turn.set_exception(error)

    async def _turn(
        self, ticket: _Ticket, began_at_s: float, first_token_by_s: float, give_up_at_s: float
    ) -> None:
        while True:
            now_s = self._clock.now_s()
            # a role that is lost later is noticed at the latest after another such time
            role_by_s = (
                max(began_at_s, self._missing_since_s) if self._was_missing else now_s
            ) + self._role_wait_s
            next_s = min(give_up_at_s, first_token_by_s, role_by_s)
            await asyncio.wait([ticket.turn], timeout=max(0.0, next_s - now_s))
            if ticket.turn.done():
                return
            now_s = self._clock.now_s()
            if now_s >= give_up_at_s:
                raise DeadlineError(f"request {ticket.item.request_id} ran out of time before it was placed")
            if now_s >= first_token_by_s:
                raise SloUnreachableError("the first token was due before the request could be placed")
            if now_s > next_s + STOOD_S:
                began_at_s = now_s
            missing = self._missing_role()
            if missing and now_s >= max(began_at_s, self._missing_since_s) + self._role_wait_s:
                raise UnavailableError(f"no {missing} node is attached")

    def _note_roles(self) -> None:
        is_missing = self._missing_role() is not None
        if is_missing and not self._was_missing:
            self._missing_since_s = self._clock.now_s()
        self._was_missing = is_missing
