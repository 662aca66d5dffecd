"""A process that holds part of the block cache, as a directory knows it."""

from __future__ import annotations

from dataclasses import dataclass

from base.grants import PeerDescriptor
from base.request import NodeId


@dataclass(frozen=True, slots=True)
class Member:
    """A holder of blocks, and its addresses."""

    node_id: NodeId
    epoch: int
    """64 bits, random at each start; replicas of an earlier start are nobody's."""
    address: str
    """host:port of its KvStore service."""
    host: str
    """The machine; replicas go to different ones."""
    peer: PeerDescriptor
    """The member's transfer agent."""
    block_bytes: int
