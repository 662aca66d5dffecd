"""Events of a simulation: what happens when, and in which order at one moment.

A heap of moments, and a list of calls for each: numbers compare in a fraction of the time that
tuples with a number for the order take, and of the calls of one moment the list is the order.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Schedule = Callable[..., None]
"""`Events.at`: (moment, what to call, its arguments...)."""


class Events:
    """Calls that are still to be made."""

    def __init__(self) -> None:
        self.num_scheduled = 0
        self.moments: list[float] = []
        """A heap of those to come, to be read only."""
        self._due: dict[float, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def at(self, moment_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Let `call(*arguments)` happen at a moment, after all that was scheduled for it before."""
        self.num_scheduled += 1
        due = self._due.get(moment_s)
        if due is None:
            self._due[moment_s] = [(call, arguments)]
            heappush(self.moments, moment_s)
        else:
            due.append((call, arguments))

    def run_next(self) -> None:
        """Make all happen that is due at the next moment, what it schedules for that moment too."""
        moment_s = heappop(self.moments)
        for call, arguments in self._due[moment_s]:
            call(*arguments)
        del self._due[moment_s]
