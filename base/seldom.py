"""Log lines that others can cause at will: one a minute of each kind, with how many there were.

The first of a kind is logged at once. Those within `PAUSE_S` of a line are counted, and the next line after
it says how many. More kinds than `MAX_KINDS` are one, so what anybody can write is some lines a minute.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from base.clock import Clock
from base.logs import event

PAUSE_S = 60.0
MAX_KINDS = 16
OTHERS = "others"


@dataclass(slots=True)
class _Kind:
    logged_at_s: float
    num_unlogged: int = 0


class Seldom:
    """Logs warnings seldom. Belongs to one thread."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}

    def event(self, message: str, kind: str, **fields: object) -> None:
        """Log as `base.logs.event` does, unless there was a line of `kind` a moment ago."""
        now_s = self._clock.now_s()
        name = f"{message} {kind}"
        if name not in self._kinds and len(self._kinds) >= MAX_KINDS:
            name = OTHERS
        seen = self._kinds.get(name)
        if seen is not None and now_s < seen.logged_at_s + PAUSE_S:
            seen.num_unlogged += 1
            return
        more = {"unlogged": seen.num_unlogged} if seen is not None and seen.num_unlogged else {}
        self._kinds[name] = _Kind(now_s)
        event(self._log, message, level=logging.WARNING, **fields, **more)
