"""Which transport carries a batch: the fastest that reaches the segment.

"Fastest" is what was measured to this peer, or a prior until then. A transport that
failed a batch is passed over for COOLDOWN_S, twice as long after each further failure,
so that a broken path costs one batch its time and not every one; that batch goes on by
the next transport.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from base.clock import Clock
from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from base.logs import event
from transfer.batch import Pieces, Priority
from transfer.transport import (
    MEASURED_FROM_BYTES,
    Route,
    Tally,
    Totals,
    TransferFacts,
    TransferObserver,
    Transport,
)

PRIOR_BYTES_PER_S = {
    "cuda_ipc": 300e9,
    "rdma": 20e9,
    "staged_rdma": 10e9,
    "shm": 4e9,
    "tcp": 2e9,
    "staged_tcp": 1e9,
}
COOLDOWN_S = 1.0
MAX_COOLDOWN_S = 60.0
_WEIGHT = 0.2
RANKED_FOR_S = 1.0
"""Batches go by the ranking of a moment ago: to ask every transport again takes longer than to copy 64 KiB.
What fails is ranked anew at once."""

MAX_PATHS = 4096
"""Whose ranking is remembered."""

_Path = tuple[str, int, int, int | None]
"""A peer, its epoch, its segment, and the device of our memory."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    epoch: int
    bytes_per_s: float
    failures: int = 0
    rests_until_s: float = 0.0


_Way = tuple[Transport, _Record, Tally]
_NEVER: tuple[float, list[_Way]] = (0.0, [])


class Router:
    """Owns the transports and what is known of each path. One event loop calls it."""

    def __init__(
        self,
        transports: Sequence[Transport],
        clock: Clock,
        absent: Mapping[str, str] | None = None,
        observers: Sequence[TransferObserver] = (),
    ) -> None:
        """`absent`: why each configured transport that cannot work here cannot."""
        self._observers = observers
        self._absent = dict(absent or {})
        self._transports = {transport.name: transport for transport in transports}
        self._clock = clock
        self._totals = {name: Tally() for name in self._transports}
        self._records: dict[tuple[str, str], _Record] = {}
        self._lately: dict[_Path, tuple[float, list[_Way]]] = {}

    def add(self, transport: Transport) -> None:
        """Offer one more."""
        self._transports[transport.name] = transport
        self._totals[transport.name] = Tally()
        self._lately.clear()

    def choose(self, peer: PeerDescriptor, segment_id: int, device: int | None = None) -> Route:
        """Return the route; raises TransferFailedError if nothing reaches the segment."""
        names, refused = self._ranked(peer, segment_id, device)
        if not names:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise TransferFailedError(f"nothing reaches {peer.node_id}: {reasons or 'no transport'}")
        record = self._record(peer, names[0])
        reason = "the fastest that reaches it" if self._is_rested(record) else "all failed lately"
        for other in names[1:]:
            is_rested = self._is_rested(self._record(peer, other))
            refused.append((other, "slower" if is_rested else "failed lately"))
        return Route(names[0], reason, record.bytes_per_s, tuple(refused))

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        """Carry out one batch; raises as `Transport.move`.

        Where a transport fails, the next takes the batch from its beginning: it puts the
        same bytes in the same places, and the grant is checked again.
        """
        num_bytes = pieces.num_bytes
        ways = self._ways(peer, grant.segment_id, pieces.segment.device)
        for way in ways:
            batch = TransferFacts(peer.node_id, way[0].name, grant, num_bytes)
            for observer in self._observers:
                observer.begun(batch)
            begun_s = self._clock.now_s()
            try:
                await way[0].move(peer, grant, pieces, priority)
            except BaseException as error:
                self._ended(batch, self._clock.now_s() - begun_s, error)
                if not isinstance(error, TransferFailedError):
                    raise
                self._failed(ways, way, error)
            else:
                self._arrived(way, batch, self._clock.now_s() - begun_s)
                return

    def totals(self) -> tuple[Totals, ...]:
        """Return what each transport has carried since the start."""
        return tuple(
            Totals(name, each.batches, each.num_bytes, each.failures) for name, each in self._totals.items()
        )

    async def close(self) -> None:
        """Close every transport."""
        for transport in self._transports.values():
            await transport.close()

    def _arrived(self, way: _Way, batch: TransferFacts, seconds: float) -> None:
        _, record, totals = way
        record.failures = 0
        totals.batches += 1
        totals.num_bytes += batch.num_bytes
        if batch.num_bytes >= MEASURED_FROM_BYTES and seconds > 0:
            record.bytes_per_s += _WEIGHT * (batch.num_bytes / seconds - record.bytes_per_s)
        self._ended(batch, seconds, None)

    def _ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        for observer in self._observers:
            observer.ended(batch, seconds, error)

    def _failed(self, ways: list[_Way], way: _Way, error: TransferFailedError) -> None:
        """Count a failure; raise it if there is no other way."""
        transport, record, totals = way
        cooldown_s = min(MAX_COOLDOWN_S, COOLDOWN_S * 2**record.failures)
        record.failures += 1
        record.rests_until_s = self._clock.now_s() + cooldown_s
        totals.failures += 1
        self._lately.clear()
        if way is ways[-1]:
            raise error
        event(log, "transport failed", level=logging.WARNING, transport=transport.name, reason=error)

    def _ways(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> list[_Way]:
        """Return the transports to try, in order; raises TransferFailedError if there is none."""
        now_s = self._clock.now_s()
        path = (peer.node_id, peer.epoch, segment_id, device)
        until_s, ways = self._lately.get(path, _NEVER)
        if until_s <= now_s:
            if len(self._lately) >= MAX_PATHS:
                self._lately.clear()
            names, _ = self._ranked(peer, segment_id, device)
            if not names:
                self.choose(peer, segment_id, device)
            ways = [(self._transports[name], self._record(peer, name), self._totals[name]) for name in names]
            self._lately[path] = (now_s + RANKED_FOR_S, ways)
        return ways

    def _ranked(
        self, peer: PeerDescriptor, segment_id: int, device: int | None
    ) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the transports that reach the segment, best first, and why the others do not."""
        usable: list[tuple[bool, float, str]] = []
        refused = list(self._absent.items())
        for name, transport in self._transports.items():
            refusal = transport.refusal_or_none(peer, segment_id, device)
            if refusal is None:
                record = self._record(peer, name)
                usable.append((self._is_rested(record), record.bytes_per_s, name))
            else:
                refused.append((name, refusal))
        usable.sort(reverse=True)
        return [name for _, _, name in usable], refused

    def _is_rested(self, record: _Record) -> bool:
        return record.rests_until_s <= self._clock.now_s()

    def _record(self, peer: PeerDescriptor, name: str) -> _Record:
        key = (peer.node_id, name)
        record = self._records.get(key)
        if record is None or record.epoch != peer.epoch:
            record = self._records[key] = _Record(peer.epoch, PRIOR_BYTES_PER_S[name])
        return record
