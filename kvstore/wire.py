"""The store's values to protobuf messages and back. What comes in is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from base.block_hash import HASH_BYTES, BlockHash
from base.errors import ProtocolError
from base.request import NodeId
from base.wire import peer_from, peer_to
from kvstore.member import Member
from protos import kvstore_pb2 as pb

MAX_CHAIN_BLOCKS = 1 << 16


def chain_to(chain: Sequence[BlockHash]) -> bytes:
    """Return a chain as one run of bytes."""
    return b"".join(chain)


def chain_from(data: bytes) -> list[BlockHash]:
    """Return the hashes in `data`; raises ProtocolError if it is not whole hashes, or too many."""
    if len(data) % HASH_BYTES or len(data) > MAX_CHAIN_BLOCKS * HASH_BYTES:
        raise ProtocolError(f"a chain of {len(data)} bytes")
    return [BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]


def member_to(member: Member) -> pb.StoreMember:
    return pb.StoreMember(
        node_id=member.node_id,
        epoch=member.epoch,
        address=member.address,
        host=member.host,
        peer=peer_to(member.peer),
        block_bytes=member.block_bytes,
    )


def member_from(message: pb.StoreMember) -> Member:
    return Member(
        NodeId(message.node_id),
        message.epoch,
        message.address,
        message.host,
        peer_from(message.peer),
        message.block_bytes,
    )


def member_from_bytes(data: bytes) -> Member:
    """Raises ProtocolError if `data` is no StoreMember."""
    try:
        return member_from(pb.StoreMember.FromString(data))
    except DecodeError as error:
        raise ProtocolError("a member that cannot be read") from error
