"""What every transport offers, and which one carries a batch.

A transport moves the pieces of one batch under one grant. Its contract, which
`tests/contract/test_transport.py` holds every one of them to:

* Nothing is touched that the grant does not allow at that moment, on the owner's word.
* `move` returns when every byte is where it belongs, or raises; there is no third way.
* When it has returned or raised, cancellation included, our memory is left alone.
* A peer that is gone, or has another epoch, fails every batch under way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from base.grants import Endpoint, Grant, PeerDescriptor
from transfer.batch import Pieces, Priority, TransferBatch
from transfer.owned.ranges import Ranges
from transfer.owned.segment import Segment

MEASURED_FROM_BYTES = 1 << 20
"""A smaller batch measures latency and not bandwidth."""


@dataclass(slots=True)
class Tally:
    """What one transport has carried."""

    batches: int = 0
    num_bytes: int = 0
    failures: int = 0


class Opening(NamedTuple):
    """What a passage is wanted for."""

    peer: PeerDescriptor
    grant: Grant
    ours: Segment
    allowed: Ranges
    """By the grant."""
    tally: Tally
    """Counts what goes through."""
    measured: Callable[[int, float], None]
    """Is told (bytes, seconds) of what is large enough to measure the way by."""


class Passage(Protocol):
    """A way that is open for a moment, for small batches of one grant and one segment of ours."""

    def carried(self, batch: TransferBatch) -> bool:
        """Carry out a batch before returning; raises as `Transport.move`.

        False: nothing was done; the passage is closed by now, or this is no batch of one small request.
        """
        ...


class Transport(Protocol):
    """One way to reach a peer's memory. The event loop calls it."""

    @property
    def name(self) -> str:
        """The `transport` of its endpoints."""
        ...

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        """Return why it cannot reach this segment of the peer from our memory; None: it can.

        `device`: the CUDA device that ours is on; None: the host.
        """
        ...

    def way(self, device: int | None) -> str:
        """Return, in a line, by what of this host memory on `device` goes, and why; empty: one way."""
        return ""

    @property
    def now_bytes(self) -> int:
        """The most bytes of a request that `open_now` is asked for."""
        return 0

    def open_now(self, wanted: Opening) -> Passage | None:
        """Return a way that small batches take within a call; raises as `move`. None: `move` is for all."""
        return None

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        """Carry out the grant's operation on every piece.

        Raises:
            LeaseExpiredError: the lease ran out.
            StaleError: the grant was revoked, or the peer was restarted.
            ProtocolError: the peer says that the grant does not allow it.
            TransferFailedError: the peer cannot be reached or went away.
            Whatever is raised, any part of the target may have been written.
        """
        ...

    async def close(self) -> None:
        """Fail what is under way and give everything back."""
        ...


class Carriage(Protocol):
    """Both sides of a way between processes that is handed in whole: a simulated network."""

    @property
    def transports(self) -> Sequence[Transport]: ...

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Where peers reach us."""
        ...

    def detach(self, generation: int, done: Callable[[], None]) -> None:
        """Leave the memory of an ended grant alone; call `done` when peers do so too."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """Which transport a batch takes, and why: for metrics and the doctor."""

    transport: str
    reason: str
    bytes_per_s: float
    """Measured to this peer by this transport; its prior before the first batch."""
    refused: tuple[tuple[str, str], ...]
    """(transport, why not) for each that was not taken."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What one transport has carried since the start, as the asking side."""

    transport: str
    batches: int
    num_bytes: int
    failures: int
