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
from base.grants import Operation
from transfer.ranges import Ranges
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


def plan_pieces(operation: Operation, allowed: Ranges, requests: Sequence[TransferRequest]) -> list[Piece]:
    """Return the requests as pieces, neighbours merged, in the order given.

    Raises:
        ProtocolError: a range lies outside our segment or outside what the grant allows.
            The peer checks too; here the mistake has a stack trace.
    """
    is_write = operation is Operation.WRITE
    pieces: list[Piece] = []
    segment, offset, peer_offset, length = None, 0, 0, 0
    for request in requests:
        ours, theirs = request.source_offset, request.target_offset
        if not is_write:
            ours, theirs = theirs, ours
        _require_inside(request, ours, theirs, allowed)
        if request.segment is segment and offset + length == ours and peer_offset + length == theirs:
            length += request.length
            continue
        if segment is not None:
            pieces.append(Piece(segment, offset, peer_offset, length))
        segment, offset, peer_offset, length = request.segment, ours, theirs, request.length
    if segment is not None:
        pieces.append(Piece(segment, offset, peer_offset, length))
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


def _require_inside(request: TransferRequest, ours: int, theirs: int, allowed: Ranges) -> None:
    length = request.length
    if length <= 0 or ours < 0 or ours + length > request.segment.num_bytes:
        raise ProtocolError(f"bytes {ours} to {ours + length} are not in our segment")
    if not allowed.covers(theirs, length):
        raise ProtocolError(f"peer bytes from {theirs} are not in the grant")
