"""Requests that wait to be placed: while the nodes have enough ahead of them, or a role has no node.

A node serves in order of arrival, so order among requests can be kept only by not sending
too many ahead. A request that comes while nobody waits is tried at once; one that cannot be placed yet
waits, and `pump` tries those who wait in the order of `fair_queue.py` whenever something changed: a prefill
ended, a request left, a node came, went or reported news (`NodeState.heard`), or its queue became short
enough.

Waiting is bounded in number (one of the tenant with the most waiting is let go) and in time: by the
request's own bounds, and where no node of a role is left by `role_wait_s`, which is what a lost node needs
to be back.

Pure state: no clock, no tasks. `serving/` waits with futures, replay with events, and both ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from base.errors import DeadlineError, RejectedError, ServeError, SloUnreachableError, UnavailableError
from base.request import RequestId
from conductor.placing.fair_queue import FairQueue, Waiting, pressed

LONG_LINE_S = 5.0
"""Predicted seconds of waiting from which on who comes without a bound is ordered by what it takes."""

SHORTEST_LOOK_S = 1.0
"""Seconds between two looks for a lost role, at least."""


class Waiter(Protocol):
    """The owner of a request that wants to be placed."""

    def try_to_place(self, ahead_s: float) -> bool:
        """Place the request; False: it has to wait. Others before it take `ahead_s` predicted seconds.

        Raises:
            ServeError: waiting is of no use.
        """
        ...

    def ended(self, error: ServeError | None) -> None:
        """Take in that the request was placed while it waited, or why it never will be."""
        ...


@dataclass(slots=True)
class WaitingPlace:
    """A request that waits, and the moments that its waiting ends at."""

    item: Waiting
    waiter: Waiter
    began_at_s: float
    first_token_by_s: float
    give_up_at_s: float


class PlacementQueue:
    """The requests of one conductor that are not placed yet."""

    def __init__(
        self,
        max_waiting: int,
        role_wait_s: float,
        missing_role: Callable[[bool], str | None],
        num_prefill_nodes: Callable[[], int],
        now_s: float,
    ) -> None:
        """Begin with nobody waiting.

        Args:
            max_waiting: At most; then one of the tenant with the most is let go.
            role_wait_s: For a role that has no node, at most.
            missing_role: Names a role without a node that a request needs, which decodes or does not.
            num_prefill_nodes: They share the work of those who wait.
            now_s: On the clock of all other moments.
        """
        self._queue = FairQueue(max_waiting)
        self._role_wait_s = role_wait_s
        self._missing_role = missing_role
        self._num_prefill_nodes = num_prefill_nodes
        self.places: dict[RequestId, WaitingPlace] = {}
        """The requests that wait, by name; to be read only."""
        self._missing_since_s: dict[bool, float | None] = {True: now_s, False: now_s}
        """The moment since which a role that requests need has no node, by whether they decode; or None."""

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.places

    @property
    def waiting_s(self) -> float:
        """Predicted seconds of prefill of those who wait."""
        return sum(place.item.cost_s for place in self.places.values())

    @property
    def line_s(self) -> float:
        """Predicted seconds of prefill that those who wait put before one who comes, on each of the nodes."""
        return self.waiting_s / max(1, self._num_prefill_nodes())

    def join(
        self,
        item: Waiting,
        waiter: Waiter,
        now_s: float,
        first_token_by_s: float,
        give_up_at_s: float,
        was_tried: bool = False,
    ) -> bool:
        """Try a request at once where nobody is before it; return whether it waits.

        Args:
            item: The request.
            waiter: Tried with no other request between two, so that each sees the last.
            now_s: Of its arrival in the queue.
            first_token_by_s: By the request's SLO, or by patience; infinity: there is neither.
            give_up_at_s: The request's end.
            was_tried: Its owner, to whom the queue was empty, has tried it at this very moment.

        Raises:
            ServeError: what its try raised, or those before it take longer than it may wait.
        """
        self._note_roles(now_s)
        ahead_s = self._queue.seconds_ahead(item) / max(1, self._num_prefill_nodes())
        if ahead_s > LONG_LINE_S:
            item = pressed(item)
            ahead_s = self._queue.seconds_ahead(item) / max(1, self._num_prefill_nodes())
        may_try = not was_tried and (ahead_s or not len(self._queue))
        if may_try and waiter.try_to_place(ahead_s):
            return False
        if now_s + ahead_s > first_token_by_s:
            raise SloUnreachableError("the first token is due before those who wait could be placed")
        self.places[item.request_id] = WaitingPlace(item, waiter, now_s, first_token_by_s, give_up_at_s)
        shed = self._queue.push(item)
        if shed is not None:
            error = RejectedError(f"{len(self._queue)} requests wait, the limit of scheduler.max_waiting")
            self.places.pop(shed.request_id).waiter.ended(error)
        if not ahead_s and len(self._queue) > 1:
            self.pump(now_s)
        return item.request_id in self.places

    def leave(self, request_id: RequestId) -> None:
        """Forget a request; one that does not wait is passed over."""
        if self.places.pop(request_id, None) is not None:
            self._queue.drop(request_id)

    def pump(self, now_s: float, most: float = inf) -> bool:
        """Try those who wait, in order, until one has to wait on; return whether `most` were tried before."""
        if not self.places:
            return False
        self._note_roles(now_s)
        num_tried = 0
        while (item := self._queue.first()) is not None:
            if num_tried == most:
                return True
            num_tried += 1
            waiter = self.places[item.request_id].waiter
            try:
                if not waiter.try_to_place(0.0):
                    return False
            except ServeError as error:
                self.leave(item.request_id)
                # without its traceback, which holds this frame, and so the waiter, which may hold the error
                waiter.ended(error.with_traceback(None))
                continue
            self._queue.take(item)
            del self.places[item.request_id]
            waiter.ended(None)
        return False

    def look_at_s(self, request_id: RequestId, now_s: float) -> float:
        """Return when to ask whether a request that waits is `overdue`."""
        place = self.places[request_id]
        role_by_s = self._role_by_s(place, now_s)
        if role_by_s == inf:
            # a role that is lost later is noticed at the latest after another such time
            role_by_s = now_s + max(SHORTEST_LOOK_S, self._role_wait_s)
        return min(place.give_up_at_s, place.first_token_by_s, role_by_s)

    def overdue(self, request_id: RequestId, now_s: float, has_stood: bool = False) -> ServeError | None:
        """Return why a request has waited long enough; None: it may wait on.

        While the process stood still (`has_stood`) no lost node could be back: that does not count.
        """
        place = self.places[request_id]
        if now_s >= place.give_up_at_s:
            reason = "before it was placed: server.request_timeout_s, or its own deadline"
            return DeadlineError(f"request {request_id} ran out of time {reason}")
        if now_s >= place.first_token_by_s:
            return SloUnreachableError("the first token was due before the request could be placed")
        if has_stood:
            place.began_at_s = now_s
        if now_s >= self._role_by_s(place, now_s):
            return UnavailableError(f"no {self._missing_role(place.item.decodes)} node is attached")
        return None

    def _role_by_s(self, place: WaitingPlace, now_s: float) -> float:
        """Return when a role that the request needs has had no node for too long; infinity: all have some."""
        self._note_roles(now_s)
        since_s = self._missing_since_s[place.item.decodes]
        return inf if since_s is None else max(place.began_at_s, since_s) + self._role_wait_s

    def _note_roles(self, now_s: float) -> None:
        for decodes, since_s in self._missing_since_s.items():
            if self._missing_role(decodes) is None:
                self._missing_since_s[decodes] = None
            elif since_s is None:
                self._missing_since_s[decodes] = now_s
