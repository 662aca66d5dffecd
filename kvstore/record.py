"""The bytes in front of a block on disk: what it is, and how to see that it is whole.

    magic 8 | version 4 | header length 4 | block hash 16 | payload length 8 |
    sequence 8 | the block's checksum 8 | xxh3-64 of the payload 8 | crc32 of all before 4 |
    zeros to 4096

Pure. A header is believed only if every field is right; its payload only if its xxh3 is.
So a record needs no commit protocol on disk: whatever a crash, a full disk or a stray write
leaves is either a whole record or no record. The block's checksum was made where its KV was
made, maybe on a GPU, and is compared where the KV is used; here it is only kept.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass

from base.block_hash import HASH_BYTES, BlockHash

HEADER_BYTES = 4096
"""One page: a payload after it can be read and written past the page cache."""
MAGIC = b"CNDKVBLK"
VERSION = 2
MAX_SEQUENCE = 1 << 63
"""The highest number believed, from which whoever writes counts on: as many again are left."""
_FIELDS = struct.Struct(f"<8sII{HASH_BYTES}sQQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """A record's description of itself, in the order of its bytes."""

    block_hash: BlockHash
    length: int
    """Bytes of payload."""
    sequence: int
    """Grows with each record written; of two with one hash the higher is the newer."""
    checksum: int
    """Checksum of the block, as it was stored with."""
    payload_xxh3: int


def encode_header(header: RecordHeader) -> bytes:
    """Return the `HEADER_BYTES` in front of a payload."""
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, *astuple(header))
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def header_or_none(data: bytes | memoryview) -> RecordHeader | None:
    """Return what `data` begins with; None: no record of ours, or a damaged one."""
    fields = bytes(data[: _FIELDS.size])
    tail = bytes(data[_FIELDS.size : _FIELDS.size + _CRC.size])
    if len(tail) < _CRC.size or _CRC.unpack(tail)[0] != zlib.crc32(fields):
        return None
    magic, version, header_bytes, block_hash, length, sequence, *sums = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES or sequence > MAX_SEQUENCE:
        return None
    return RecordHeader(BlockHash(block_hash), length, sequence, *sums)
