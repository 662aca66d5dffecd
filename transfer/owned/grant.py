"""Table of grants: what peers may do to our segments, decided by our clock alone.

Each grant lives in a numbered slot:

    free  --issue-->  live  --revoke/expire-->  ended  --retire-->  free

and keeps the slot while ended, because copies that were under way may still touch its
ranges; `retire` is called when they cannot. A retired slot remembers how its last grant
ended until it is used again, so that a late peer learns that it expired or was revoked.

A generation is 48 random bits over 16 bits of slot: the slot finds the grant without a
search, also in memory shared with a peer; the random part cannot be guessed, and a
repeat within one slot is drawn again.

Pure: no I/O; clock and randomness are handed in. One thread changes the table. Others
may call `check`, which reads one immutable entry.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from base.clock import Clock
from base.errors import CapacityError, LeaseExpiredError, ProtocolError, StaleError
from base.grants import Grant, Operation
from transfer.owned.ranges import Offsets, Ranges, ranges_of

SLOT_BITS = 16
NUM_SLOTS = 4096
"""Grants live or draining at once; one request holds one or two."""
_SECRET_BITS = 64 - SLOT_BITS
SLOT_MASK = (1 << SLOT_BITS) - 1


class GrantState(Enum):
    """Where a grant is in its life."""

    LIVE = 1
    REVOKED = 2
    EXPIRED = 3


_NOWHERE = ranges_of((0,), 1)


@dataclass(frozen=True, slots=True)
class _Entry:
    grant: Grant
    expires_at_s: float
    state: GrantState
    ranges: Ranges


class GrantTable:
    """Owns every grant on this process's segments. `check_invariant()` asserts the partition."""

    def __init__(
        self,
        clock: Clock,
        num_slots: int = NUM_SLOTS,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        if not 0 < num_slots <= 1 << SLOT_BITS:
            raise ValueError(f"num_slots is between 1 and {1 << SLOT_BITS}, not {num_slots}")
        self._clock = clock
        self._random_bits = random_bits
        self._num_slots = num_slots
        self._entries: dict[int, _Entry] = {}
        """The last grant of each slot."""
        self._free: deque[int] = deque(range(num_slots))
        self._live: set[int] = set()
        """The generations of live grants."""
        self._ended: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_ended(self) -> int:
        """Grants that ended and whose slot is not free yet."""
        return len(self._ended)

    def issue(
        self,
        segment_id: int,
        operation: Operation,
        offsets: Sequence[int] | Offsets,
        length: int,
        lease_s: float,
    ) -> Grant:
        """Return a new live grant on `length` bytes at each offset.

        The caller has checked that the ranges lie in the segment.

        Raises:
            CapacityError: every slot is taken. Nothing changes.
            ValueError: no range, an empty range, or no lease.
        """
        if not len(offsets) or length <= 0 or lease_s <= 0:
            raise ValueError("a grant has a range, a length and a lease")
        if not self._free:
            raise CapacityError(f"all {self._num_slots} grants are in use")
        starts = np.array(offsets, np.int64)
        ranges = ranges_of(starts, length)
        slot = self._free.popleft()
        generation = self._draw(slot)
        grant = Grant(segment_id, generation, operation, tuple(starts.tolist()), length, lease_s)
        expires_at_s = self._clock.now_s() + lease_s
        self._entries[slot] = _Entry(grant, expires_at_s, GrantState.LIVE, ranges)
        self._live.add(generation)
        return grant

    def check(
        self, segment_id: int, generation: int, operation: Operation, offsets: Offsets, lengths: Offsets
    ) -> None:
        """Return if the grant allows all these ranges now.

        Raises:
            LeaseExpiredError: its lease ran out.
            StaleError: it was revoked, or this process never issued it.
            ProtocolError: it is live and allows something else.
        """
        if not self._allowed(segment_id, generation, operation).covers(offsets, lengths):
            raise ProtocolError("a range lies outside the grant")

    def require_live(self, generation: int) -> None:
        """Raise as `check` does if the grant has ended."""
        self._live_entry(generation)

    def live(self, generation: int) -> tuple[Grant, float]:
        """Return a live grant, and the seconds that its lease still runs; raises as `check` does."""
        entry = self._live_entry(generation)
        return entry.grant, entry.expires_at_s - self._clock.now_s()

    def revoke(self, generation: int) -> bool:
        """End a live grant; return whether it was live."""
        return self._end(generation, GrantState.REVOKED)

    def expire(self) -> list[int]:
        """End the grants whose lease ran out; return their generations."""
        now_s = self._clock.now_s()
        due = [generation for generation in self._live if self._expires_at_s(generation) <= now_s]
        for generation in due:
            self._end(generation, GrantState.EXPIRED)
        return due

    def next_expiry_in_s(self) -> float | None:
        """Return the seconds until some live grant's lease runs out; None: there is no grant."""
        if not self._live:
            return None
        return max(0.0, min(map(self._expires_at_s, self._live)) - self._clock.now_s())

    def retire(self, generation: int) -> None:
        """Free the slot of an ended grant: nothing can touch its ranges through it any more."""
        if generation in self._ended:
            self._ended.remove(generation)
            slot = generation & SLOT_MASK
            entry = self._entries[slot]
            # Kept until the slot is used again, for the reason alone.
            self._entries[slot] = replace(entry, grant=replace(entry.grant, offsets=()), ranges=_NOWHERE)
            self._free.append(slot)

    def is_retired(self, generation: int) -> bool:
        """Return whether nothing can touch the ranges of this grant any more."""
        return generation not in self._live and generation not in self._ended

    def check_invariant(self) -> None:
        """Assert that every slot is in exactly one of free, live and ended."""
        taken = [*self._live, *self._ended]
        places = [*self._free, *(generation & SLOT_MASK for generation in taken)]
        assert sorted(places) == list(range(self._num_slots)), "a slot is lost or in two places"
        for generation in taken:
            entry = self._entries[generation & SLOT_MASK]
            assert entry.grant.generation == generation, "a slot holds another grant"
            assert (entry.state is GrantState.LIVE) == (generation in self._live), (
                "a grant is in the wrong place"
            )

    def _draw(self, slot: int) -> int:
        last = self._entries.get(slot)
        while True:
            generation = self._random_bits(_SECRET_BITS) << SLOT_BITS | slot
            # Zero marks "no grant" in shared memory.
            if generation >> SLOT_BITS and (last is None or last.grant.generation != generation):
                return generation

    def _allowed(self, segment_id: int, generation: int, operation: Operation) -> Ranges:
        entry = self._live_entry(generation)
        grant = entry.grant
        if grant.segment_id != segment_id:
            raise ProtocolError(f"the grant is on segment {grant.segment_id:#x}, not {segment_id:#x}")
        if grant.operation is not operation:
            raise ProtocolError(f"the grant is to {grant.operation.name}, not to {operation.name}")
        return entry.ranges

    def _live_entry(self, generation: int) -> _Entry:
        entry = self._entries.get(generation & SLOT_MASK)
        if entry is None or entry.grant.generation != generation:
            raise StaleError(f"no grant {generation:#x}")
        if entry.state is GrantState.REVOKED:
            raise StaleError(f"grant {generation:#x} was revoked")
        if entry.state is GrantState.EXPIRED or entry.expires_at_s <= self._clock.now_s():
            raise LeaseExpiredError(f"the lease of grant {generation:#x} ran out")
        return entry

    def _end(self, generation: int, state: GrantState) -> bool:
        if generation not in self._live:
            return False
        self._live.remove(generation)
        slot = generation & SLOT_MASK
        self._entries[slot] = replace(self._entries[slot], state=state)
        self._ended.add(generation)
        return True

    def _expires_at_s(self, generation: int) -> float:
        return self._entries[generation & SLOT_MASK].expires_at_s
