"""Values by which one process lets another use its memory: addresses and permissions.

Values only. They stand in `base` because they travel in the messages of every layer;
what they mean is enforced in `transfer`. Durations travel, moments do not: a grant says
for how long it held when it was sent, and only its issuer's clock decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from base.kv_layout import KvPart


class Operation(Enum):
    """The kind of access that a grant allows; the values are those of `protos/transfer.proto`."""

    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one transport reaches a process."""

    transport: str
    """tcp, shm, cuda_ipc or rdma."""
    address: str
    """The transport's own form."""


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """A peer's name, epoch and addresses. A restarted peer has another epoch."""

    node_id: str
    epoch: int
    """64 bits, random at each start."""
    endpoints: tuple[Endpoint, ...]
    secret: bytes = field(default=b"", repr=False)
    """Random at each start; who connects to the process proves to know it."""

    def address_or_none(self, transport: str) -> str | None:
        """Return where `transport` reaches this peer; None: it does not."""
        for endpoint in self.endpoints:
            if endpoint.transport == transport:
                return endpoint.address
        return None


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read or write some equal ranges of one segment, until revoked or expired."""

    segment_id: int
    generation: int
    """64 bits; names this grant, unguessable, never reused in an epoch."""
    operation: Operation
    offsets: tuple[int, ...]
    """Bytes from the start of the segment."""
    length: int
    """Bytes at each offset."""
    expires_in_s: float
    """When sent."""

    def __hash__(self) -> int:
        # What is remembered of a grant is looked up for each batch; hashing thousands of
        # offsets would cost as much as moving the bytes.
        return hash(self.generation)


@dataclass(frozen=True, slots=True)
class RankGrant:
    """Leave to write the part of blocks that one rank of a node has."""

    peer: PeerDescriptor
    """The rank."""
    part: KvPart
    """The part of each block that the rank's segment has."""
    grant: Grant
