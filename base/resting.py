"""Peers, transports, NICs or files that rest because they failed: each rest is twice as long as the last.

    usable   --failed, as often as is allowed-->  resting
    resting  --failed, succeeded-->               resting   (calls that were under way before say nothing new)
    resting  --the rest is over-->                usable    (the next rest will be twice as long)
    usable   --succeeded after a rest-->          usable    (the next rest will be the first again)
    usable   --the longest rest passed since-->   usable    (forgotten, as who is gone for good is)

Pure; the clock is handed in. Without rests a peer that is gone would cost every request a timeout, and would
be asked by all of them at once when it is back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from base.clock import Clock


@dataclass(slots=True)
class _Failures:
    at_s: deque[float] = field(default_factory=deque)
    """Times of the failures since the last rest that may still count."""
    rest_s: float = 0.0
    """The last rest; 0: there was none."""
    until_s: float = -math.inf


class Resting:
    """Knows what failed, by whatever names it; `name in resting` is whether it rests now."""

    def __init__(
        self,
        clock: Clock,
        min_rest_s: float,
        max_rest_s: float,
        max_failures: int = 1,
        window_s: float = math.inf,
    ) -> None:
        """Begin. `max_failures` within `window_s` make something rest; `min_rest_s` is the first rest."""
        self._clock = clock
        self._min_rest_s = min_rest_s
        self._max_rest_s = max_rest_s
        self._max_failures = max_failures
        self._window_s = window_s
        self._known: dict[Hashable, _Failures] = {}

    def __contains__(self, name: Hashable) -> bool:
        known = self._known.get(name)
        return known is not None and self._clock.now_s() < known.until_s

    def failed(self, name: Hashable) -> float | None:
        """Count a failure; return the seconds of the rest that it begins, or None if it begins none."""
        if name in self:
            return None
        now_s = self._clock.now_s()
        if name not in self._known:
            self._forget_old(now_s)
        known = self._known.setdefault(name, _Failures())
        known.at_s.append(now_s)
        while known.at_s[0] <= now_s - self._window_s:
            known.at_s.popleft()
        if len(known.at_s) < self._max_failures:
            return None
        known.rest_s = min(2 * known.rest_s or self._min_rest_s, self._max_rest_s)
        known.until_s = now_s + known.rest_s
        known.at_s.clear()
        return known.rest_s

    def succeeded(self, name: Hashable) -> None:
        """Forget the rests of what works again."""
        known = self._known.get(name)
        if known is not None and known.rest_s and name not in self:
            del self._known[name]

    def _forget_old(self, now_s: float) -> None:
        """Forget what has not failed for the longest rest after its last: who names peers makes new names."""
        for name, known in list(self._known.items()):
            last_s = max(known.until_s, known.at_s[-1] + self._window_s if known.at_s else -math.inf)
            if last_s + self._max_rest_s < now_s:
                del self._known[name]
