"""Contract of every transport, and the values that pass between transports, router and observers.

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
from typing import Protocol

from base.grants import Endpoint, Grant, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.owned.segment import Segment

MEASURED_FROM_BYTES = 1 << 20
"""A smaller batch measures latency and not bandwidth."""
STAGED = "staged_"
"""Prefix of the name of a transport that carries a GPU's memory by way of host memory."""


class Transport(Protocol):
    """How to reach a peer's memory. The event loop calls it."""

    @property
    def name(self) -> str:
        """The `transport` of its endpoints."""
        ...

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        """Return why it cannot reach this segment of the peer from our memory; None: it can.

        `device`: the CUDA device that ours is on; None: the host.
        """
        ...

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


@dataclass(slots=True, eq=False)
class TransferFacts:
    """One batch on one transport: what an observer is notified of. Equal to itself alone."""

    peer: str
    """The node that it goes to or comes from."""
    transport: str
    grant: Grant
    num_bytes: int


class TransferObserver:
    """Is notified of batches where they happen, in the event loop; raises nothing. A batch that one transport
    fails and the next takes counts as two."""

    def begun(self, batch: TransferFacts) -> None:
        """Note that a transport has been given the batch."""

    def ended(self, batch: TransferFacts, seconds: float, error: BaseException | None) -> None:
        """Note that the transport has done with it. `error`: what it raised, a cancellation too."""


class AbsentError(Exception):
    """A configured transport cannot work here: the reason, in one line."""


@dataclass(frozen=True, slots=True)
class OfferedTransport:
    """A transport that works here, as the function `offer` of its module makes it from a `TransferHost`.

    Raises AbsentError or ImportError where it cannot work, OSError where its port is taken.
    """

    transport: Transport
    address: str = ""
    """Where peers reach us by it; empty for those of this host, who read the board."""
    is_wire: bool = False
    """Whether it carries host memory to other hosts, so that a GPU's memory is staged for it."""
    pin: Callable[[Segment], object] | None = None
    """Makes a new segment ready; raises TransferFailedError where the transport cannot reach it."""


class Carriage(Protocol):
    """Both sides of a network that is handed in whole, for a simulation."""

    @property
    def transports(self) -> Sequence[Transport]: ...

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Where peers reach us."""
        ...

    def detach(self, generation: int, done: Callable[[], None]) -> None:
        """Leave the memory of an ended grant alone; call `done` when peers do so too."""
        ...
