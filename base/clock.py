"""Time, handed in. `time.monotonic` is called here and nowhere else.

A moment of one host's clock is never compared with another's: durations travel,
moments do not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple, Protocol

SCHEDULED = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds for which the reading thread has run, and those for which it was ready and did not."""


class Busy(NamedTuple):
    """Seconds that a thread has worked, and waited for a processor, since it began."""

    worked_s: float
    """Seconds for which it had one."""
    waited_s: float
    """Seconds for which it was ready to work, and others had them."""


class Clock(Protocol):
    """Where a class gets the time from."""

    def now_s(self) -> float:
        """Return seconds on this process's monotonic clock."""
        ...

    def busy(self) -> Busy:
        """Return how long the calling thread has worked, and waited for a processor."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.monotonic)  # each request asks some twenty times

    def busy(self) -> Busy:
        return Busy(time.thread_time(), _waited_s())


def _waited_s() -> float:
    """Return seconds for which other threads had the processors that the calling one was ready for.

    0 where the kernel does not count them.
    """
    try:
        return int(SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def wall_clock_s() -> float:
    """Return seconds since 1970, for `created` fields and log lines only."""
    return time.time()
