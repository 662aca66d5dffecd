"""Members of the block cache and chains, as protobuf messages and back. What comes in is not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from google.protobuf.message import DecodeError

from base.block_hash import HASH_BYTES, BlockHash
from base.codec import message_of
from base.errors import ProtocolError
from base.grants import PeerDescriptor
from base.request import NodeId
from base.wire import PEER
from protos import kvstore_pb2 as pb

MAX_CHAIN_BLOCKS = 1 << 16
_HASH = Struct(f"{HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class Member:
    """A process that holds part of the block cache, as a directory knows it."""

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


MEMBER = message_of(Member, peer=PEER)


def chain_to(chain: Sequence[BlockHash]) -> bytes:
    """Return a chain as one run of bytes."""
    return b"".join(chain)


def chain_from(data: bytes) -> list[BlockHash]:
    """Return the hashes in `data`; raises ProtocolError unless they are whole, each once, and not many."""
    if len(data) % HASH_BYTES or len(data) > MAX_CHAIN_BLOCKS * HASH_BYTES:
        raise ProtocolError(f"a chain of {len(data)} bytes")
    chain = [BlockHash(name) for (name,) in _HASH.iter_unpack(data)]
    if len(set(chain)) < len(chain):
        raise ProtocolError("a block is in a chain twice")
    return chain


def member_from_bytes(data: bytes) -> Member:
    """Raises ProtocolError if `data` is no StoreMember."""
    try:
        return MEMBER.unpack(pb.StoreMember.FromString(data))
    except DecodeError as error:
        raise ProtocolError("a member that cannot be read") from error
