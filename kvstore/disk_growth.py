"""Whether the disk tier's file may grow: a full disk stops it for a while, and one write then tries again.

    growing --failed--> resting --due--> probing --stored--> growing
                           ^________failed_____/

Blocks are overwritten where they are meanwhile. Each rest is twice as long as the one before, up to
`MAX_REST_S`; a write that grows the file ends that. Belongs to the event loop.
"""

from __future__ import annotations

from enum import Enum

from base.clock import Clock

MIN_REST_S = 1.0
MAX_REST_S = 300.0


class Growth(Enum):
    """Where the file is; the values are those of the metric."""

    GROWING = "growing"
    RESTING = "resting"
    PROBING = "probing"


class Happened(Enum):
    """An event that changes the state."""

    STORED = 1
    FAILED = 2
    DUE = 3


_AFTER = {
    (Growth.GROWING, Happened.FAILED): Growth.RESTING,
    (Growth.RESTING, Happened.DUE): Growth.PROBING,
    (Growth.PROBING, Happened.STORED): Growth.GROWING,
    (Growth.PROBING, Happened.FAILED): Growth.RESTING,
}
"""The state after each event. A pair that is not here changes nothing: a write that was under way when the
first one failed."""


class DiskGrowth:
    """Decides whether a write may take a slot that the file does not have yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rest_s = MIN_REST_S
        self._due_s = 0.0
        self.state = Growth.GROWING

    def begin(self) -> bool:
        """Return whether the file may grow by a write that begins now."""
        if self.state is Growth.RESTING and self._clock.now_s() >= self._due_s:
            self._move(Happened.DUE)
            return True
        return self.state is Growth.GROWING

    def stored(self) -> None:
        """Take note that a write made the file longer."""
        if self._move(Happened.STORED):
            self._rest_s = MIN_REST_S

    def failed(self) -> bool:
        """Take note that one could not; return whether a rest begins with it."""
        if not self._move(Happened.FAILED):
            return False
        self._due_s = self._clock.now_s() + self._rest_s
        self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        return True

    def _move(self, happened: Happened) -> bool:
        after = _AFTER.get((self.state, happened))
        if after is not None:
            self.state = after
        return after is not None
