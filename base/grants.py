"""Leave to read or write a peer's memory, as values that travel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Operation(Enum):
    """What a grant allows."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to reach a peer; `address` has the transport's own form."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """A process that holds segments, in one of its lives."""

    node_id: str
    epoch: int
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read or write equal ranges of one segment, until revoked or expired.

    `generation` is unguessable and never used again in an epoch. `expires_in_s` counts
    from when the grant was sent.
    """

    segment_id: int
    generation: int
    operation: Operation
    offsets: tuple[int, ...]
    length: int
    expires_in_s: float
