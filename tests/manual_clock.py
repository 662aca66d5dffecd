"""A clock that stands still until a test moves it."""

from __future__ import annotations

from base.clock import Busy


class ManualClock:
    """A clock that moves by `advance` alone: tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def busy(self) -> Busy:
        """Say that nobody works: what a thread does takes none of this time."""
        return Busy(0.0, 0.0)

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; raises ValueError if that is backwards."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back ({seconds} s)")
        self._now_s += seconds
