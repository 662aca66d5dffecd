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
    rows: Offsets
    """[3, requests]: source offset, target offset, bytes."""
    length: int | None = None
    """Bytes of each, where they are known to be alike."""


def batch_of(
    segment: Segment,
    source_offsets: Sequence[int] | Offsets,
    target_offsets: Sequence[int] | Offsets,
    length: int | Sequence[int] | Offsets,
) -> TransferBatch:
    """Return a batch over copies of what was given.

    Arrays of int64 cost some microseconds for 4,096 requests, lists 300.

    Args:
        segment: Ours, on either side.
        source_offsets: Where each request begins, in the segment that is read.
        target_offsets: The same in the segment that is written.
        length: Bytes of each request, or of all of them, which is cheaper to check.

    Raises:
        ValueError: the offsets are not equally many, or not numbers of 63 bits.
    """
    try:
        sources, targets = np.asarray(source_offsets, np.int64), np.asarray(target_offsets, np.int64)
        if sources.ndim != 1 or sources.shape != targets.shape:
            raise ValueError(f"{sources.shape} sources and {targets.shape} targets")
        rows = np.empty((3, len(sources)), np.int64)
        rows[0], rows[1], rows[2] = sources, targets, length
    except OverflowError as error:
        raise ValueError("offsets and lengths are below 2**63") from error
    return TransferBatch(segment, rows, length if isinstance(length, int) else None)


@dataclass(slots=True, eq=False)
class Alike:
    """Requests of one length, as they were asked for. Each call of numpy costs microseconds: few do here."""

    rows: Offsets
    """As the batch's."""
    length: int
    bits: int
    """Every bit that is set in any number of `rows`."""


Row = tuple[int, int, int]
"""A piece: offset in our segment, offset in the peer's, bytes."""


class Pieces:
    """Runs of bytes that are contiguous on both sides, checked; at least one."""

    def __init__(
        self,
        segment: Segment,
        offsets: Offsets,
        peer_offsets: Offsets,
        lengths: Offsets,
        alike: Alike | None = None,
    ) -> None:
        """`offsets` are in our segment, `peer_offsets` in the peer's. Nobody changes the arrays.

        `alike`: the same, where they are whole requests of one length.
        """
        self.segment = segment
        self.offsets = offsets
        self.peer_offsets = peer_offsets
        self.lengths = lengths
        self.alike = alike
        self.peer_bound: int | None = None
        """Where the grant ends, where that is known: none of them reaches beyond."""
        self.wants_sums = False
        """Whether checksums of what was read are asked for."""
        self.sums: list[int] | None = None
        """Checksum of each piece as it lies in our memory, where a transport took them on the way."""
        self.only: Row | None = None
        """The one piece, if there is but one: calls on arrays take microseconds, and it is waited for."""
        if len(lengths) == 1:
            self.only = offsets.item(), peer_offsets.item(), lengths.item()
            self.num_bytes: int = self.only[2]
        elif alike is not None:
            self.num_bytes = alike.length * len(lengths)
        else:
            self.num_bytes = int(np.add.reduce(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Bytes of the longest."""
        return int(np.maximum.reduce(self.lengths)) if self.alike is None else self.alike.length

    @property
    def peer_end(self) -> int:
        """A byte of the peer's segment that none of them reaches up to, nor anything beyond."""
        if self.peer_bound is not None:
            return self.peer_bound
        return int(np.maximum.reduce(self.peer_offsets + self.lengths))

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

    def merged(self) -> Pieces:
        """Return the same bytes with neighbours as one, for who pays for each piece.

        Where checksums are asked for, each of one request, they stay apart.
        """
        if self.only is not None or self.wants_sums:
            return self
        ours, theirs, before = self.offsets, self.peer_offsets, self.lengths[:-1]
        is_next = ours[:-1] + before == ours[1:]
        if np.count_nonzero(is_next):
            is_next &= theirs[:-1] + before == theirs[1:]
        if not np.count_nonzero(is_next):
            return self
        firsts = np.concatenate(([0], np.flatnonzero(~is_next) + 1))
        lengths = np.add.reduceat(self.lengths, firsts)
        return Pieces(self.segment, ours[firsts], theirs[firsts], lengths)

    def cut(self, max_bytes: int) -> Pieces:
        """Return the same bytes in pieces of at most `max_bytes`, in order."""
        if self.num_bytes <= max_bytes or self.max_length <= max_bytes:
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


def plan_pieces(operation: Operation, allowed: Ranges, batch: TransferBatch) -> Pieces:
    """Return the requests as pieces, in the order given.

    Raises:
        ProtocolError: a range lies outside our segment or outside what the grant allows.
            The peer checks too; here the mistake has a stack trace.
    """
    segment, rows, length = batch.segment, batch.rows, batch.length
    ours, theirs, lengths = rows
    if operation is Operation.READ:
        ours, theirs = theirs, ours
    if len(lengths) == 1:
        pieces = Pieces(segment, ours, theirs, lengths)
        ((offset, peer_offset, length),) = pieces.rows()
        is_inside = 0 <= offset <= segment.num_bytes - length
        is_allowed = allowed.covers_one(peer_offset, length)
    elif length is not None:
        bits = np.bitwise_or.reduce(rows, axis=1).tolist()
        pieces = Pieces(segment, ours, theirs, lengths, Alike(rows, length, bits[0] | bits[1] | length))
        our_bits, peer_bits = bits[:2] if operation is Operation.WRITE else bits[1::-1]
        # No number is larger than all their bits, and those of a negative one are negative.
        room = segment.num_bytes - length
        is_inside = our_bits >= 0 and (our_bits <= room or int(np.maximum.reduce(ours)) <= room)
        is_allowed = allowed.covers_equal(theirs, length, peer_bits)
    else:
        pieces = Pieces(segment, ours, theirs, lengths)
        room = segment.num_bytes - ours
        is_inside = not np.count_nonzero(ours < 0) and not np.count_nonzero(lengths > room)
        is_allowed = allowed.covers(theirs, lengths)
    if not is_inside:
        raise ProtocolError("a request's range is not in our segment")
    if not is_allowed:
        raise ProtocolError("a request's range is not in the grant")
    pieces.peer_bound = allowed.end
    return pieces


def sums_of(pieces: Pieces) -> list[int]:
    """Return the checksum of each piece, of our memory."""
    return [checksum(view) for view in pieces.views()]
