"""Which rails (NICs) may be used: errors put one to rest, time and success bring it back.

Three errors within 10 s rest a rail for 30 s, twice as long each time, five minutes at
most; the first success after a rest starts anew. Pure; clock handed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from base.clock import Clock

MAX_ERRORS = 3
WINDOW_S = 10.0
REST_S = 30.0
MAX_REST_S = 300.0


@dataclass(slots=True)
class _Record:
    errors_at_s: deque[float] = field(default_factory=deque)
    rests: int = 0
    rests_until_s: float = 0.0


class RailHealth:
    """What is known of each rail, by its name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def is_usable(self, rail: str) -> bool:
        """Return whether the rail may carry work now."""
        record = self._records.get(rail)
        return record is None or self._clock.now_s() >= record.rests_until_s

    def failed(self, rail: str) -> None:
        """Count one error of a rail."""
        record = self._records.setdefault(rail, _Record())
        now_s = self._clock.now_s()
        record.errors_at_s.append(now_s)
        while record.errors_at_s[0] <= now_s - WINDOW_S:
            record.errors_at_s.popleft()
        if len(record.errors_at_s) >= MAX_ERRORS:
            record.rests_until_s = now_s + min(MAX_REST_S, REST_S * 2**record.rests)
            record.rests += 1
            record.errors_at_s.clear()

    def succeeded(self, rail: str) -> None:
        """Forget a rail's rests: it works."""
        record = self._records.get(rail)
        if record is not None and record.rests and self.is_usable(rail):
            del self._records[rail]
