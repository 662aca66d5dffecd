"""Whom not to ask for a while: a peer that failed rests, longer with each failure in a row.

Pure; the clock is handed in. A peer that is gone would otherwise cost every request a
timeout, and be asked by all of them at once when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from base.clock import Clock
from base.errors import ServeError
from base.logs import event

log = logging.getLogger(__name__)

MIN_REST_S = 1.0
MAX_REST_S = 30.0


class Resting:
    """Peers that failed, by whatever names them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: dict[Hashable, float] = {}
        self._length_s: dict[Hashable, float] = {}

    def __contains__(self, peer: Hashable) -> bool:
        return self._clock.now_s() < self._until_s.get(peer, float("-inf"))

    def failed(self, peer: Hashable, error: ServeError) -> None:
        """Let `peer` rest: a second, then twice as long each time, half a minute at most.

        Calls that were under way together fail together: that is one failure.
        """
        if peer in self:
            return
        length_s = min(2 * self._length_s.get(peer, MIN_REST_S / 2), MAX_REST_S)
        self._length_s[peer] = length_s
        self._until_s[peer] = self._clock.now_s() + length_s
        event(log, "peer failed", level=logging.WARNING, peer=peer, rest_s=length_s, error=error)

    def answered(self, peer: Hashable) -> None:
        """Forget the failures of `peer`."""
        self._until_s.pop(peer, None)
        self._length_s.pop(peer, None)
