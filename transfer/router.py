"""Which transport carries a batch: the fastest that reaches the segment.

"Fastest" is what was measured to this peer, or a prior until then. A transport that
failed a batch is passed over for COOLDOWN_S, twice as long after each further failure,
so that a broken rail costs one batch its time and not every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from base.clock import Clock
from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Piece, Priority
from transfer.transport import Route, Transport

PRIOR_BYTES_PER_S = {"cuda_ipc": 300e9, "rdma": 20e9, "shm": 4e9, "tcp": 2e9}
COOLDOWN_S = 1.0
MAX_COOLDOWN_S = 60.0
MEASURED_FROM_BYTES = 1 << 20
"""A smaller batch measures latency and not bandwidth."""
_WEIGHT = 0.2


@dataclass(slots=True)
class _Record:
    epoch: int
    bytes_per_s: float
    failures: int = 0
    rests_until_s: float = 0.0


class Router:
    """Owns the transports and what is known of each path. One event loop calls it."""

    def __init__(self, transports: Sequence[Transport], clock: Clock) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._clock = clock
        self._records: dict[tuple[str, str], _Record] = {}

    def choose(self, peer: PeerDescriptor, segment_id: int) -> Route:
        """Return the route; raises TransferFailedError if nothing reaches the segment."""
        usable: list[tuple[bool, float, str]] = []
        refused: list[tuple[str, str]] = []
        for name, transport in self._transports.items():
            refusal = transport.refusal_or_none(peer, segment_id)
            if refusal is not None:
                refused.append((name, refusal))
                continue
            record = self._record(peer, name)
            usable.append((record.rests_until_s <= self._clock.now_s(), record.bytes_per_s, name))
        if not usable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise TransferFailedError(f"nothing reaches {peer.node_id}: {reasons or 'no transport'}")
        usable.sort(reverse=True)
        is_rested, bytes_per_s, name = usable[0]
        refused += [(other, "failed lately" if not ok else "slower") for ok, _, other in usable[1:]]
        reason = "the fastest that reaches it" if is_rested else "all failed lately"
        return Route(name, reason, bytes_per_s, tuple(refused))

    async def move(
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
        """Carry out one batch; raises as `Transport.move`."""
        name = self.choose(peer, grant.segment_id).transport
        record = self._record(peer, name)
        begun_s = self._clock.now_s()
        try:
            await self._transports[name].move(peer, grant, pieces, priority)
        except TransferFailedError:
            cooldown_s = min(MAX_COOLDOWN_S, COOLDOWN_S * 2**record.failures)
            record.failures += 1
            record.rests_until_s = self._clock.now_s() + cooldown_s
            raise
        record.failures = 0
        num_bytes = sum(piece.length for piece in pieces)
        elapsed_s = self._clock.now_s() - begun_s
        if num_bytes >= MEASURED_FROM_BYTES and elapsed_s > 0:
            record.bytes_per_s += _WEIGHT * (num_bytes / elapsed_s - record.bytes_per_s)

    async def close(self) -> None:
        """Close every transport."""
        for transport in self._transports.values():
            await transport.close()

    def _record(self, peer: PeerDescriptor, name: str) -> _Record:
        key = (peer.node_id, name)
        record = self._records.get(key)
        if record is None or record.epoch != peer.epoch:
            record = self._records[key] = _Record(peer.epoch, PRIOR_BYTES_PER_S[name])
        return record
