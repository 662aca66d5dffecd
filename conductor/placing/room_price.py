"""The price of room in the decode pool: how often a request's part of a step beyond the usual counts.

A pool has room for some of what comes, and as many requests as possible are to be served: a long
context takes the room of several of the usual length, while it decodes. Who takes as much as the mean
of those who decode displaces nobody: another in its place would take that too. Whom to leave out is a
question of price. It rises with each request that finds no room although it would pay, and falls by
itself while nobody does. So it comes to rest where those who can pay nearly always find room, whatever
the lengths are. Where the pool takes all that come, it is one, and so it is once the pool has had
nothing to do: too many came before, and no more.

That free room is no reason to take a long context cheaply was learned by trying: while it decodes the room is
missed, and half of a small pool is often free. A price by the share of requests refused, whatever for, was
weighed too: it keeps itself up. Pure state; moments come from the caller.
"""

from __future__ import annotations

from math import exp

# A request that found no room raises the price by this.
RISE = 1.2
MOST = 8.0

# Mean decode times in which the price falls to 1 / e. One that remembers longer serves more where too many
# come all the time, and refuses long contexts for longer once that is over.
REMEMBERED = 20.0


class RoomPrice:
    """The factor of what a request takes beyond the usual, as time passes and requests find no room."""

    def __init__(self) -> None:
        self.price = 1.0
        self._settled_at_s = 0.0

    def settle(self, now_s: float, decode_s: float) -> None:
        """Let it fall until a moment; a sequence decodes for `decode_s` in the mean, 0 where none does."""
        if decode_s <= 0.0:
            self.price = 1.0
        elif self.price > 1.0:
            passed = (now_s - self._settled_at_s) / (REMEMBERED * decode_s)
            self.price = max(1.0, self.price * exp(-passed))
        self._settled_at_s = now_s

    def found_no_room(self) -> None:
        """Raise it: a request was refused that would have been taken where the pool had room."""
        self.price = min(MOST, self.price * RISE)

    def restore(self, price: float, now_s: float) -> None:
        """Make this exactly the price at a moment: for decisions made again."""
        self.price = price
        self._settled_at_s = now_s
