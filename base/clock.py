"""Time, handed in. `time.monotonic` is called here and nowhere else.

A moment of one host's clock is never compared with another's: durations travel,
moments do not.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a class gets the time from."""

    def now_s(self) -> float:
        """Return seconds on this process's monotonic clock."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


def wall_clock_s() -> float:
    """Return seconds since 1970, for `created` fields and log lines only."""
    return time.time()
