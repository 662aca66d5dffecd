"""Requests that wait at a simulated engine, as far as they were known when the next step was planned.

An engine that launches ahead plans a step when the one before begins. Who came since then is in the one
after.
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
        """Number of the last step in which somebody came who is known; infinity: everybody is."""
        self._latest_step = 0

    def came(self, request: SimRequest, step: int) -> None:
        """Note that a request came while a step was under way; 0: none was."""
        request.came_in_step = step
        self._latest_step = max(self._latest_step, step)

    @property
    def are_all(self) -> bool:
        """Whether nobody came who is not known."""
        return self._latest_step <= self.until_step

    def first(self, waiting: deque[SimRequest]) -> SimRequest | None:
        """Return the first who is known of those in line; None: nobody is."""
        if self.are_all:
            return waiting[0] if waiting else None
        return next(filter(self._is_known, waiting), None)

    def among(self, waiting: deque[SimRequest]) -> Collection[SimRequest]:
        """Return those in line who are known."""
        return waiting if self.are_all else list(filter(self._is_known, waiting))

    def _is_known(self, request: SimRequest) -> bool:
        return request.came_in_step <= self.until_step
