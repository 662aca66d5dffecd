"""Waits for a request's placement: `placing/placement_queue.py` says who is next.

While the conductor's process stood still no lost node could be back: that does not count as waiting for
a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.clock import Clock
from base.errors import ServeError
from conductor.placing.fair_queue import Waiting
from conductor.placing.placement_queue import PlacementQueue

STOOD_S = 1.0
"""The least that a wait ends late by where the process stood still."""

Try = Callable[[float], bool]
"""Places a request and returns True, if so many predicted seconds of others before it are none;
False: it has to wait. A ServeError: waiting is of no use."""


class _Waiter:
    """One request of a `PlacementQueue`, for the length of `wait_until_placed`."""

    __slots__ = ("try_to_place", "turn")

    def __init__(self, attempt: Try) -> None:
        self.try_to_place = attempt
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self, error: ServeError | None) -> None:
        if self.turn.done():
            return
        if error is None:
            self.turn.set_result(None)
        else:
            self.turn.set_exception(error)


async def wait_until_placed(
    queue: PlacementQueue,
    item: Waiting,
    attempt: Try,
    first_token_by_s: float,
    give_up_at_s: float,
    clock: Clock,
    was_tried: bool = False,
) -> None:
    """Return when `attempt` has placed the request, or raise what it raised.

    Args:
        attempt: Called with no await between two requests, so that each sees the last.
        first_token_by_s: When its first token is due, on `clock`; infinity: whenever it comes.
        give_up_at_s: The request's end, on `clock`.
        was_tried: As of `PlacementQueue.join`.

    Raises:
        RejectedError: too many wait, and it is the one to go.
        SloUnreachableError: its first token was due before it could be placed.
        UnavailableError: a role had no node for too long.
        DeadlineError: its time ran out.
    """
    waiter, error = _Waiter(attempt), None
    try:
        if queue.join(item, waiter, clock.now_s(), first_token_by_s, give_up_at_s, was_tried):
            while not waiter.turn.done():
                now_s = clock.now_s()
                next_s = queue.look_at_s(item.request_id, now_s)
                await asyncio.wait([waiter.turn], timeout=max(0.0, next_s - now_s))
                if waiter.turn.done():
                    break
                now_s = clock.now_s()
                error = queue.overdue(item.request_id, now_s, has_stood=now_s > next_s + STOOD_S)
                if error is not None:
                    raise error
        if waiter.turn.done():
            waiter.turn.result()
    finally:
        queue.leave(item.request_id)
        if waiter.turn.done():
            waiter.turn.exception()  # seen: else the loop logs one that a cancelled request has not raised
        del waiter, error  # they may hold the error that leaves this frame, which the error holds
