"""How much of a store each peer holds by gRPC: reservations and leases, until they end or run out.

A peer is a host. None holds more than `MAX_TICKETS`, none has more than half of the pool reserved, and
none ends what another holds. Leases share blocks and last half a minute: their tickets alone count.
Belongs to the event loop.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum, auto
from typing import NamedTuple

from base.clock import Clock
from base.errors import CapacityError

MAX_TICKETS = 1024
"""Tickets of one peer. A node has some for each request; the store as a whole has 4,096 grants."""
SHARE = 0.5
"""Share of the pool's blocks that one peer may have reserved."""
MIN_BLOCKS = 64
"""Blocks that one peer may have in the smallest pool: a chain of a short prompt."""


class TicketKind(Enum):
    """The kind of a ticket: one of them does not end the other."""

    PUT = auto()
    READ = auto()


class _PeerTicket(NamedTuple):
    num_blocks: int
    """Blocks that nobody else can have; 0 of a lease."""
    ends_at_s: float


class PeerHolds:
    """Counts tickets and their blocks by peer."""

    def __init__(self, clock: Clock, num_blocks: int) -> None:
        self._clock = clock
        self._max_blocks = max(MIN_BLOCKS, int(num_blocks * SHARE))
        self._tickets: defaultdict[str, dict[tuple[TicketKind, int], _PeerTicket]] = defaultdict(dict)

    def num_free(self, peer: str) -> int:
        """Return how many more blocks `peer` may have; raises CapacityError if it may have no ticket more."""
        self._forget_ended()
        tickets = self._tickets.get(peer, {})
        if len(tickets) >= MAX_TICKETS:
            raise CapacityError(f"this host holds {MAX_TICKETS} reservations and leases: end some")
        return self._max_blocks - sum(ticket.num_blocks for ticket in tickets.values())

    def add(self, peer: str, name: tuple[TicketKind, int], num_blocks: int, seconds: float) -> None:
        """Count what `peer` was given for so long, under the kind and the number of its ticket."""
        self._tickets[peer][name] = _PeerTicket(num_blocks, self._clock.now_s() + seconds)

    def remove(self, peer: str, name: tuple[TicketKind, int]) -> bool:
        """Forget a ticket; return whether it was this peer's."""
        return self._tickets.get(peer, {}).pop(name, None) is not None

    def _forget_ended(self) -> None:
        now_s = self._clock.now_s()
        for peer, tickets in list(self._tickets.items()):
            for name in [name for name, ticket in tickets.items() if ticket.ends_at_s <= now_s]:
                del tickets[name]
            if not tickets:
                del self._tickets[peer]
