"""A transfer batch: many requests (source, target, length), one completion. Arrays from end to end.

A GPU's link moves 16 KiB in 45 ns, in which Python makes no object. So a batch is three
arrays, checked and merged as arrays, and a transport that can takes them as they are; the
others slice them. Requests that are neighbours on both sides become one piece, because
every transport pays for each piece and not only for its bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from base.checksum import checksum
from base.errors import ProtocolError
from base.grants import Operation
from transfer.ranges import Offsets, Ranges
from transfer.segment import Segment


class Priority(Enum):
    """Who goes first where two batches wait for one link."""

    FOREGROUND = 0
    """A request waits for it."""
    BACKGROUND = 1
    """Replication, prefetch."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferBatch:
    """What to move. A write goes from our segment to the peer's, a read the other way.

    `batch_of` makes one, from lists too.
    """

    segment: Segment
    """Ours: the source of a write, the target of a read."""
    source_offsets: Offsets
    target_offsets: Offsets
    """Bytes from the start of the segment they lie in, on either side; one for each request."""
    lengths: Offsets


def batch_of(
    segment: Segment,
    source_offsets: Sequence[int] | Offsets,
    target_offsets: Sequence[int] | Offsets,
    length: int | Sequence[int] | Offsets,
) -> TransferBatch:
    """Return a batch over copies of what was given.

    Arrays of int64 cost a microsecond for 4,096 requests, lists 300.

    Args:
        segment: Ours, on either side.
        source_offsets: Where each request begins, in the segment that is read.
        target_offsets: The same in the segment that is written.
        length: Bytes of each request, or of all of them.

    Raises:
        ValueError: the offsets are not equally many, or not numbers of 63 bits.
    """
    try:
        sources = np.array(source_offsets, np.int64)
        targets = np.array(target_offsets, np.int64)
        lengths = np.array(np.broadcast_to(np.asarray(length, np.int64), sources.shape))
    except OverflowError as error:
        raise ValueError("offsets and lengths are below 2**63") from error
    if sources.ndim != 1 or sources.shape != targets.shape:
        raise ValueError(f"{sources.shape} sources and {targets.shape} targets")
    return TransferBatch(segment, sources, targets, lengths)


Row = tuple[int, int, int]
"""A piece: offset in our segment, offset in the peer's, bytes."""


class Pieces:
    """Runs of bytes that are contiguous on both sides, checked; at least one."""

    def __init__(self, segment: Segment, offsets: Offsets, peer_offsets: Offsets, lengths: Offsets) -> None:
        """`offsets` are in our segment, `peer_offsets` in the peer's. Nobody changes the arrays."""
        self.segment = segment
        self.offsets = offsets
        self.peer_offsets = peer_offsets
        self.lengths = lengths
        self.wants_sums = False
        """Whether checksums of what was read are asked for."""
        self.sums: list[int] | None = None
        """Checksum of each piece as it lies in our memory, where a transport took them on the way."""
        self.only: Row | None = None
        """The one piece, if there is but one: calls on arrays take microseconds, and it is waited for."""
        if len(lengths) == 1:
            self.only = offsets.item(), peer_offsets.item(), lengths.item()
            self.num_bytes: int = self.only[2]
        else:
            self.num_bytes = int(np.add.reduce(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def peer_end(self) -> int:
        """The first byte of the peer's segment that none of them reaches up to."""
        return int((self.peer_offsets + self.lengths).max())

    def rows(self) -> Iterable[Row]:
        """Return each."""
        if self.only is not None:
            return (self.only,)
        return zip(self.offsets.tolist(), self.peer_offsets.tolist(), self.lengths.tolist(), strict=True)

    def views(self) -> list[memoryview]:
        """Return our memory of each."""
        memory = self.segment.memory
        return [memory[offset : offset + length] for offset, _, length in self.rows()]

    def chosen(self, rows: slice) -> Pieces:
        """Return some of them."""
        return Pieces(self.segment, self.offsets[rows], self.peer_offsets[rows], self.lengths[rows])

    def cut(self, max_bytes: int) -> Pieces:
        """Return the same bytes in pieces of at most `max_bytes`, in order."""
        if self.num_bytes <= max_bytes or int(self.lengths.max()) <= max_bytes:
            return self
        counts = -(-self.lengths // max_bytes)
        num_parts = int(counts.sum())
        owners = np.repeat(np.arange(len(self)), counts)
        skipped = max_bytes * (np.arange(num_parts) - (counts.cumsum() - counts)[owners])
        lengths = np.minimum(self.lengths[owners] - skipped, max_bytes)
        return Pieces(
            self.segment, self.offsets[owners] + skipped, self.peer_offsets[owners] + skipped, lengths
        )

    def grouped(self, max_bytes: int, max_pieces: int) -> list[Pieces]:
        """Return groups of at most `max_pieces` pieces and `max_bytes` bytes, in order."""
        if self.num_bytes <= max_bytes and len(self) <= max_pieces:
            return [self]
        parts = self.cut(max_bytes)
        ends = parts.lengths.cumsum()
        groups, first, begun = [], 0, 0
        while first < len(parts):
            last = min(int(ends.searchsorted(begun + max_bytes, "right")), first + max_pieces)
            groups.append(parts.chosen(slice(first, last)))
            first, begun = last, int(ends[last - 1])
        return groups


def plan_pieces(operation: Operation, allowed: Ranges, batch: TransferBatch, merge: bool = True) -> Pieces:
    """Return the requests as pieces in the order given, with `merge` neighbours as one.

    Raises:
        ProtocolError: a range lies outside our segment or outside what the grant allows.
            The peer checks too; here the mistake has a stack trace.
    """
    ours, theirs, lengths = batch.source_offsets, batch.target_offsets, batch.lengths
    if operation is Operation.READ:
        ours, theirs = theirs, ours
    pieces = Pieces(batch.segment, ours, theirs, lengths)
    if pieces.only is not None:
        offset, peer_offset, length = pieces.only
        is_inside = 0 <= offset <= batch.segment.num_bytes - length
        is_allowed = allowed.covers_one(peer_offset, length)
    else:
        room = batch.segment.num_bytes - ours
        is_inside = not np.count_nonzero(ours < 0) and not np.count_nonzero(lengths > room)
        is_allowed = allowed.covers(theirs, lengths)
    if not is_inside:
        raise ProtocolError("a request's range is not in our segment")
    if not is_allowed:
        raise ProtocolError("a request's range is not in the grant")
    return _merged(pieces) if merge and pieces.only is None else pieces


def sums_of(pieces: Pieces) -> list[int]:
    """Return the checksum of each piece, of our memory."""
    return [checksum(view) for view in pieces.views()]


def _merged(pieces: Pieces) -> Pieces:
    ours, theirs, lengths = pieces.offsets, pieces.peer_offsets, pieces.lengths
    before = lengths[:-1]
    is_first = np.ones(len(lengths), np.bool_)
    np.logical_or(ours[:-1] + before != ours[1:], theirs[:-1] + before != theirs[1:], out=is_first[1:])
    if np.count_nonzero(is_first) == len(lengths):
        return pieces
    firsts = np.flatnonzero(is_first)
    return Pieces(pieces.segment, ours[firsts], theirs[firsts], np.add.reduceat(lengths, firsts))
