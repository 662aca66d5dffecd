"""A transfer batch: many (source, target, length), one completion.

Pure: what the caller asked is checked and put into the form that transports carry.
Requests that are neighbours on both sides become one piece, because every transport
pays for each piece and not only for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from base.errors import ProtocolError
from base.grants import Grant, Operation
from transfer.ranges import Ranges, ranges_of
from transfer.segment import Segment


class Priority(Enum):
    """Who goes first where two batches wait for one link."""

    FOREGROUND = 0
    """A request waits for it."""
    BACKGROUND = 1
    """Replication, prefetch."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One range to move. A write goes from our segment to the peer's, a read the other way."""

    segment: Segment
    """Ours: the source of a write, the target of a read."""
    source_offset: int
    target_offset: int
    """Offsets are bytes from the start of the segment they lie in, on either side."""
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes that is contiguous on both sides."""

    segment: Segment
    offset: int
    """In our segment."""
    peer_offset: int
    """In the peer's."""
    length: int

    @property
    def memory(self) -> memoryview:
        return self.segment.memory[self.offset : self.offset + self.length]

    @property
    def address(self) -> int:
        return self.segment.address + self.offset

    def part(self, start: int, length: int) -> Piece:
        """Return `length` bytes of it from `start`."""
        return Piece(self.segment, self.offset + start, self.peer_offset + start, length)


def plan_pieces(grant: Grant, requests: Sequence[TransferRequest]) -> list[Piece]:
    """Return the requests as pieces, neighbours merged, in the order given.

    Raises:
        ProtocolError: a range lies outside our segment or outside the grant. The peer
            checks too; here the mistake has a stack trace.
    """
    allowed = ranges_of(grant.offsets, grant.length)
    pieces: list[Piece] = []
    for request in requests:
        piece = _piece_of(grant.operation, request)
        _require_inside(piece, allowed)
        last = pieces[-1] if pieces else None
        if (
            last is not None
            and last.segment is piece.segment
            and last.offset + last.length == piece.offset
            and last.peer_offset + last.length == piece.peer_offset
        ):
            pieces[-1] = Piece(last.segment, last.offset, last.peer_offset, last.length + piece.length)
        else:
            pieces.append(piece)
    return pieces


def split_pieces(pieces: Sequence[Piece], max_bytes: int, max_pieces: int) -> list[list[Piece]]:
    """Return groups of at most `max_pieces` pieces and `max_bytes` bytes, in order."""
    groups: list[list[Piece]] = []
    group: list[Piece] = []
    room = max_bytes
    for piece in pieces:
        start = 0
        while start < piece.length:
            if room == 0 or len(group) == max_pieces:
                groups.append(group)
                group, room = [], max_bytes
            length = min(room, piece.length - start)
            group.append(piece if length == piece.length else piece.part(start, length))
            start += length
            room -= length
    if group:
        groups.append(group)
    return groups


def _piece_of(operation: Operation, request: TransferRequest) -> Piece:
    if operation is Operation.WRITE:
        return Piece(request.segment, request.source_offset, request.target_offset, request.length)
    return Piece(request.segment, request.target_offset, request.source_offset, request.length)


def _require_inside(piece: Piece, allowed: Ranges) -> None:
    if piece.length <= 0 or piece.offset < 0 or piece.offset + piece.length > piece.segment.num_bytes:
        raise ProtocolError(f"bytes {piece.offset} to {piece.offset + piece.length} are not in our segment")
    if not allowed.covers(piece.peer_offset, piece.length):
        raise ProtocolError(f"peer bytes from {piece.peer_offset} are not in the grant")
