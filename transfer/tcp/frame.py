"""Frames of the tcp transport: a fixed header, sometimes a table of ranges, a payload.

    header   magic, version, kind, refusal, number of ranges, frame id, payload bytes,
             segment, generation, offset (of the first range)
    table    offset and length of each range; only if there are two or more
    payload  the ranges' bytes, one after the other

    HELLO, CHALLENGE, PROOF, WELCOME: `transfer/tcp/greeting.py`
    WRITE    -> payload            ACK  <- done; or REFUSED
    READ     -> no payload         DATA <- payload; or REFUSED
    PAIR     -> payload            DATA <- payload; or REFUSED    (one-sided transports:
    HOLD     -> no payload         DATA <- payload; or REFUSED     queue pairs, leave to touch
    LET_GO   -> of a HOLD's frame id, as `offset`; no answer       what a grant allows, the end
    RECALL   <- of all holds on a generation; no answer            of that, and its being wanted)

Little-endian. What a peer sends is checked here against bounds before a byte of memory
is set aside for it; every fault is a ProtocolError, after which the connection ends.
Pure.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from base.errors import (
    LeaseExpiredError,
    LostError,
    ProtocolError,
    ServeError,
    StaleError,
    TransferFailedError,
)
from transfer.owned.ranges import Offsets

MAX_FRAME_BYTES = 4 << 20
"""Payload of one frame: 1 to 2 ms on a fast loopback, the longest anything urgent waits."""
SMALL_BYTES = 1 << 20
"""Largest batch that the event loop sends by itself: it takes 0.2 ms, and a change of threads counts."""
MAX_RANGES = 1024
_MAX_SHORT_BYTES = 512
_MAGIC = 0x4D534721
_VERSION = 4
_HEADER = struct.Struct("<IHBBIIQQQQQ")
HEADER_BYTES = _HEADER.size
RANGE_BYTES = 16


class FrameKind(IntEnum):
    """Kind of a frame; the head of the file says which answers which."""

    HELLO = 1
    WELCOME = 2
    WRITE = 3
    READ = 4
    DATA = 5
    ACK = 6
    REFUSED = 7
    PAIR = 8
    HOLD = 9
    LET_GO = 10
    RECALL = 11
    CHALLENGE = 12
    PROOF = 13


_WITH_PAYLOAD = frozenset({FrameKind.WRITE, FrameKind.DATA, FrameKind.REFUSED, FrameKind.PAIR})
_SHORT = frozenset({FrameKind.REFUSED, FrameKind.PAIR})

_REFUSALS: tuple[type[ServeError], ...] = (
    ServeError,
    StaleError,
    LeaseExpiredError,
    ProtocolError,
    TransferFailedError,
)
"""An error's number on the wire is its place here."""


class Header(NamedTuple):
    """The fixed part of a frame. A tuple: a frozen dataclass takes 2 us more to make."""

    kind: FrameKind
    frame_id: int = 0
    num_bytes: int = 0
    """Size of the payload; for a READ, of the payload that is asked for."""
    segment_id: int = 0
    generation: int = 0
    offset: int = 0
    num_ranges: int = 1
    refusal: int = 0

    @property
    def table_bytes(self) -> int:
        return self.num_ranges * RANGE_BYTES if self.num_ranges > 1 else 0

    @property
    def payload_bytes(self) -> int:
        return self.num_bytes if self.kind in _WITH_PAYLOAD else 0


def pack(header: Header, table: bytes = b"") -> bytes:
    """Return a frame without its payload. `table`: what `table_of` returned for its ranges."""
    kind, *numbers, _, refusal = header
    num_ranges = len(table) // RANGE_BYTES or 1
    return _HEADER.pack(_MAGIC, _VERSION, kind, refusal, num_ranges, 0, *numbers) + table


def table_of(offsets: Offsets, lengths: Offsets) -> bytes:
    """Return the table of a frame's ranges; empty for a single one, which the header has."""
    if len(offsets) == 1:
        return b""
    return np.stack((offsets, lengths), 1).astype("<i8", copy=False).tobytes()


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Return the header in HEADER_BYTES bytes; raises ProtocolError."""
    magic, version, number, refusal, num_ranges, _, frame_id, num_bytes, segment, generation, offset = (
        _HEADER.unpack(data)
    )
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(f"not our protocol: magic {magic:#x}, version {version}")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise ProtocolError(f"no frame is of kind {number}") from None
    limit = _MAX_SHORT_BYTES if kind in _SHORT else MAX_FRAME_BYTES
    if num_bytes > limit or not 1 <= num_ranges <= MAX_RANGES:
        raise ProtocolError(f"a frame of {num_bytes} bytes in {num_ranges} ranges")
    return Header(kind, frame_id, num_bytes, segment, generation, offset, num_ranges, refusal)


def unpack_ranges(header: Header, table: bytes | bytearray | memoryview) -> tuple[Offsets, Offsets]:
    """Return offsets and lengths of the ranges of a WRITE or READ; raises ProtocolError.

    Numbers above 2**63 come out negative, and no grant covers those.
    """
    if header.num_ranges == 1:
        offsets, lengths = np.array(((header.offset,), (header.num_bytes,)), np.uint64).view(np.int64)
        adds_up = header.num_bytes > 0
    else:
        both = np.frombuffer(table, "<i8")
        offsets, lengths = both[::2], both[1::2]
        adds_up = int(lengths.min()) > 0 and int(lengths.sum()) == header.num_bytes
    if not adds_up:
        raise ProtocolError(f"the ranges do not add up to {header.num_bytes} bytes")
    return offsets, lengths


def pack_refusal(frame_id: int, error: ServeError) -> bytes:
    """Return a REFUSED frame, reason included."""
    reason = str(error).encode()[:_MAX_SHORT_BYTES]
    number = next(
        (place for place in range(1, len(_REFUSALS)) if isinstance(error, _REFUSALS[place])),
        _REFUSALS.index(TransferFailedError) if isinstance(error, LostError) else 0,
    )
    return pack(Header(FrameKind.REFUSED, frame_id, len(reason), refusal=number)) + reason


def refusal_error(header: Header, reason: bytes) -> ServeError:
    """Return the error that a REFUSED frame carries."""
    kind = _REFUSALS[header.refusal] if header.refusal < len(_REFUSALS) else ProtocolError
    return kind(reason.decode(errors="replace"))
