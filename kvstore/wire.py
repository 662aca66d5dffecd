"""The store's values to protobuf messages and back. What comes in is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from base.block_hash import HASH_BYTES, BlockHash
from base.codec import message_of
from base.errors import ProtocolError
from base.wire import PEER
from kvstore.member import Member
from protos import kvstore_pb2 as pb

MAX_CHAIN_BLOCKS = 1 << 16

MEMBER = message_of(Member, peer=PEER)


def chain_to(chain: Sequence[BlockHash]) -> bytes:
    """Return a chain as one run of bytes."""
    return b"".join(chain)


def chain_from(data: bytes) -> list[BlockHash]:
    """Return the hashes in `data`; raises ProtocolError if it is not whole hashes, or too many."""
    if len(data) % HASH_BYTES or len(data) > MAX_CHAIN_BLOCKS * HASH_BYTES:
        raise ProtocolError(f"a chain of {len(data)} bytes")
    return [BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]


def member_from_bytes(data: bytes) -> Member:
    """Raises ProtocolError if `data` is no StoreMember."""
    try:
        return MEMBER.unpack(pb.StoreMember.FromString(data))
    except DecodeError as error:
        raise ProtocolError("a member that cannot be read") from error
