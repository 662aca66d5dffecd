"""Progress of weights that are made ready: a line in the log after each gigabyte, of what is no less."""

from __future__ import annotations

import logging

from base.logs import event

log = logging.getLogger(__name__)

SHOWN_BYTES = 1 << 30
"""Progress is in the log after each such part, and at the end of what is no less."""


class LoadProgress:
    """Logs how much of a model's weights is through one part of loading."""

    def __init__(self, what: str, num_bytes: int) -> None:
        """Begin; `what` is what the lines say that happens to so many bytes in all."""
        self._what = what
        self._whole = num_bytes
        self._done = self._shown = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that are through."""
        self._done += num_bytes
        if self._done - self._shown >= SHOWN_BYTES or (self._shown and self._done == self._whole):
            self._shown = self._done
            event(log, self._what, gigabytes=round(self._done / 1e9, 1), of=round(self._whole / 1e9, 1))
