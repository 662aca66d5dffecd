"""Rests of members that do not answer, and the log line of each rest."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from base.clock import Clock
from base.errors import ServeError
from base.logs import event
from base.resting import Resting

log = logging.getLogger(__name__)


def resting_peers(clock: Clock) -> Resting:
    """Return a memory of failed peers, by whatever names them: they rest for a second to half a minute."""
    return Resting(clock, 1.0, 30.0)


def note_failure(resting: Resting, peer: Hashable, error: ServeError) -> None:
    """Let `peer` rest, and log that unless it rests already."""
    rest_s = resting.failed(peer)
    if rest_s is not None:
        event(log, "peer failed", level=logging.WARNING, peer=peer, rest_s=rest_s, error=error)
