"""Requests that wait at a simulated engine, as far as they were known when the next step was planned.

An engine that launches ahead plans a step before the one before ends. Who comes later is in the one after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

from conductor.replay.sim_request import SimRequest


class KnownArrivals:
    """Knows which of those who wait at one engine a step is planned with. Steps are numbered from 1."""

    def __init__(self) -> None:
        """Begin with everybody known."""
        self.until_step = inf
        """Number of the last step that somebody missed who is known; infinity: everybody is."""
        self._latest_step = 0

    def came(self, request: SimRequest, missed_step: int) -> None:
        """Note that a request came, and the last step that was planned before; 0: it is in the next one."""
        request.missed_step = missed_step
        self._latest_step = max(self._latest_step, missed_step)

    @property
    def are_all(self) -> bool:
        """Whether nobody came who is not known."""
        return self._latest_step <= self.until_step

    def first(self, waiting: deque[SimRequest]) -> SimRequest | None:
        """Return the first who is known of those in line; None: nobody is."""
        if self._latest_step <= self.until_step:
            return waiting[0] if waiting else None
        return next(filter(self._is_known, waiting), None)

    def among(self, waiting: deque[SimRequest]) -> Collection[SimRequest]:
        """Return those in line who are known."""
        return waiting if self.are_all else list(filter(self._is_known, waiting))

    def _is_known(self, request: SimRequest) -> bool:
        return request.missed_step <= self.until_step


def put_in_order(waiting: deque[SimRequest], request: SimRequest) -> None:
    """Put a request before those in line that are later in order."""
    at = len(waiting)
    while at and waiting[at - 1].order > request.order:
        at -= 1
    waiting.insert(at, request)
