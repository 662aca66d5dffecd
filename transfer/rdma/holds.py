"""An asker's holds on the grants of one peer: asked for once, kept for the batches that follow.

    asked  --admitted-->  in use  <--begun, ended-->  idle  --idle for a sweep, recalled-->  let go
      \\--refused-->  gone

To ask costs a way there and back, more than a small batch does, so what one batch was given the next
one takes over. What a grant allows is still the owner's word each time, as far as it has reached us:

* A hold covers the grant as the owner has it. It compares a checksum over all that ours says.
* A grant that ends is recalled: no batch begins under it any more, and it is let go at the end of
  those that are under way. `revoke` waits for that. Who does not let go loses its queue pairs.
* The owner says how long the lease still runs, and it is counted from before it was asked: after that
  the next batch asks again.

An idle hold is let go after one to two sweeps, so that a revocation soon after the last batch mostly
finds nothing to wait for. The event loop owns everything.
"""

from __future__ import annotations

import asyncio
import struct

from base.clock import Clock
from base.grants import Grant
from transfer.owned.board import digest_of
from transfer.rdma.registrations import Reach, unpack_reach
from transfer.tcp.frame import FrameKind
from transfer.tcp.link import Call, ClientLink

SWEEP_S = 0.001
"""Batches of one request follow each other within this. A revocation waits for an idle hold at most as long
as the recall is under way: the loop need only turn."""
_LEASE = struct.Struct("<d")
ADMISSION_BYTES = _LEASE.size + Reach.PACKED_BYTES


def pack_admission(left_s: float, reach: Reach) -> bytes:
    """Return an owner's answer: the seconds that the lease still runs, and how NICs address the segment."""
    return _LEASE.pack(left_s) + reach.pack()


class Hold:
    """The owner's leave to touch what one grant allows."""

    def __init__(self, grant: Grant, asked_at_s: float) -> None:
        self.grant = grant
        self.call = Call(FrameKind.HOLD, ADMISSION_BYTES)
        self.call.frame.generation = grant.generation
        self.call.frame.offset = digest_of(grant)
        self.expires_at_s = asked_at_s
        self.reach: Reach
        self.num_users = 1
        self.was_used = True
        """Whether a batch used it since the last sweep."""
        self.is_recalled = False

    def admit(self, answer: bytes) -> None:
        """Take in what the owner answered."""
        (left_s,) = _LEASE.unpack_from(answer)
        self.expires_at_s += left_s
        self.reach = unpack_reach(answer[_LEASE.size :])


class Holds:
    """Owns the holds on one peer's grants. `take` or `ask`, then `release` once."""

    def __init__(self, link: ClientLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._all: set[Hold] = set()
        self._kept: dict[int, Hold] = {}
        """Holds that the next batch takes, one for each generation."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, grant: Grant) -> Hold | None:
        """Return a hold that is there already; None: ask."""
        hold = self._kept.get(grant.generation)
        if hold is None or self._clock.now_s() >= hold.expires_at_s:
            return None
        if hold.grant is not grant and hold.grant != grant:
            return None
        hold.num_users += 1
        hold.was_used = True
        return hold

    async def ask(self, grant: Grant) -> Hold:
        """Ask the owner; raises what it refuses with, or TransferFailedError."""
        while True:
            hold = Hold(grant, self._clock.now_s())
            # From now on: a recall may come right behind the answer, before this goes on.
            self._all.add(hold)
            try:
                hold.admit(await hold.call.answered(self._link))
            except BaseException:
                self._let_go(hold)
                raise
            if not hold.is_recalled:
                break
            # It has ended. Asked again, the owner says how.
            self._let_go(hold)
        before = self._kept.get(grant.generation)
        self._kept[grant.generation] = hold
        if before is not None and not before.num_users:
            self._let_go(before)
        return hold

    def release(self, hold: Hold) -> None:
        """The batch has ended: it touches nothing any more."""
        hold.num_users -= 1
        if hold.num_users:
            return
        if self._kept.get(hold.grant.generation) is not hold:
            self._let_go(hold)
        elif self._timer is None:
            self._timer = self._loop.call_later(SWEEP_S, self.sweep)

    def recall(self, generation: int) -> None:
        """The owner wants it back: the grant has ended."""
        for hold in [each for each in self._all if each.grant.generation == generation]:
            hold.is_recalled = True
            if self._kept.get(generation) is hold:
                del self._kept[generation]
                if not hold.num_users:
                    self._let_go(hold)

    def sweep(self) -> None:
        """Let go what was idle since the last sweep. Called by a timer; a test may call it too."""
        self._timer = None
        idle = [hold for hold in self._kept.values() if not hold.num_users]
        for hold in idle:
            if hold.was_used:
                hold.was_used = False
            else:
                del self._kept[hold.grant.generation]
                self._let_go(hold)
        if any(hold in self._all for hold in idle):
            self._timer = self._loop.call_later(SWEEP_S, self.sweep)

    def close(self) -> None:
        """The connection has ended, and every hold with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kept.clear()
        self._all.clear()

    def _let_go(self, hold: Hold) -> None:
        if hold in self._all:
            self._all.remove(hold)
            self._link.let_go(hold.call.frame)
