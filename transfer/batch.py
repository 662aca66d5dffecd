"""A transfer batch: many pieces (our offset, the peer's, length), one completion. Arrays from end to end.

A GPU's link moves 16 KiB in 45 ns, in which Python makes no object. So a batch is three
arrays, checked and merged as arrays, and a transport that can takes them as they are; the
others slice them. Pieces that are neighbours on both sides become one, because every
transport pays for each piece and not only for its bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np

from base.errors import ProtocolError
from transfer.owned.ranges import Offsets, Ranges
from transfer.owned.segment import Segment


class Priority(Enum):
    """Order of two batches that wait for one link."""

    FOREGROUND = 0
    """A request waits for it."""
    BACKGROUND = 1
    """Nobody waits for it: bytes are saved or prefetched."""


Row = tuple[int, int, int]
"""A piece: offset in our segment, offset in the peer's, bytes."""


class Pieces:
    """Runs of bytes, each contiguous on both sides; a transport gets those that `require_allowed` checked."""

    def __init__(self, segment: Segment, numbers: Offsets, length: int | None = None) -> None:
        """Nobody changes `numbers`.

        Args:
            numbers: [3, pieces]: offset in our segment, bytes, offset in the peer's.
            length: Bytes of each, where they are known to be alike.
        """
        self.segment = segment
        self.numbers = numbers
        self.length = length
        self.bits: int | None = None
        """Every bit that is set in any of `numbers`, where that is known."""
        self.peer_bound: int | None = None
        """Where the grant ends, where that is known: none of them reaches beyond."""
        self.only: Row | None = None
        """The one piece, if there is but one: calls on arrays take microseconds, and it is waited for."""
        if numbers.shape[1] == 1:
            ((offset,), (num_bytes,), (peer_offset,)) = numbers.tolist()
            self.only = offset, peer_offset, num_bytes
            self.num_bytes: int = num_bytes
        elif length is not None:
            self.num_bytes = length * numbers.shape[1]
        else:
            self.num_bytes = int(np.add.reduce(numbers[1]))

    def __len__(self) -> int:
        count: int = self.numbers.shape[1]
        return count

    @property
    def offsets(self) -> Offsets:
        """Offsets of their beginnings in our segment."""
        return self._row(0)

    @property
    def lengths(self) -> Offsets:
        return self._row(1)

    @property
    def peer_offsets(self) -> Offsets:
        """Offsets of their beginnings in the peer's segment."""
        return self._row(2)

    @property
    def max_length(self) -> int:
        """Bytes of the longest."""
        return int(np.maximum.reduce(self.lengths)) if self.length is None else self.length

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
        offsets, lengths, peer_offsets = self.numbers.tolist()
        return zip(offsets, peer_offsets, lengths, strict=True)

    def _row(self, index: int) -> Offsets:
        row: Offsets = self.numbers[index]
        return row

    def views(self) -> list[memoryview]:
        """Return our memory of each."""
        memory = self.segment.memory
        return [memory[offset : offset + length] for offset, _, length in self.rows()]

    def merged(self) -> Pieces:
        """Return the same bytes with neighbours as one, for who pays for each piece."""
        if self.only is not None:
            return self
        ours, lengths, theirs = self.numbers
        before = lengths[:-1]
        is_next = ours[:-1] + before == ours[1:]
        if np.count_nonzero(is_next):
            is_next &= theirs[:-1] + before == theirs[1:]
        if not np.count_nonzero(is_next):
            return self
        firsts = np.concatenate(([0], np.flatnonzero(~is_next) + 1))
        numbers = self.numbers[:, firsts]
        numbers[1] = np.add.reduceat(lengths, firsts)
        return Pieces(self.segment, numbers)

    def cut(self, max_bytes: int) -> Pieces:
        """Return the same bytes in pieces of at most `max_bytes`, in order."""
        if self.num_bytes <= max_bytes or self.max_length <= max_bytes:
            return self
        counts = -(-self.lengths // max_bytes)
        num_parts = int(counts.sum())
        owners = np.repeat(np.arange(len(self)), counts)
        skipped = max_bytes * (np.arange(num_parts) - (counts.cumsum() - counts)[owners])
        numbers = self.numbers[:, owners]
        numbers += skipped * np.array([[1], [-1], [1]])
        numbers[1] = np.minimum(numbers[1], max_bytes)
        return Pieces(self.segment, numbers)

    def grouped(self, max_bytes: int, max_pieces: int) -> list[Pieces]:
        """Return groups of at most `max_pieces` pieces and `max_bytes` bytes, in order."""
        if self.num_bytes <= max_bytes and len(self) <= max_pieces:
            return [self]
        parts = self.cut(max_bytes)
        ends = parts.lengths.cumsum()
        groups, first, begun = [], 0, 0
        while first < len(parts):
            last = min(int(ends.searchsorted(begun + max_bytes, "right")), first + max_pieces)
            groups.append(Pieces(parts.segment, parts.numbers[:, first:last]))
            first, begun = last, int(ends[last - 1])
        return groups


def pieces_of(
    segment: Segment,
    offsets: Sequence[int] | Offsets,
    peer_offsets: Sequence[int] | Offsets,
    length: int | Sequence[int] | Offsets,
) -> Pieces:
    """Return pieces over copies of what was given; nothing is checked against a grant yet.

    Arrays of int64 cost some microseconds for 4,096 pieces, lists 300.

    Args:
        segment: Ours: the source of a write, the target of a read.
        offsets: Where each piece begins in it.
        peer_offsets: The same in the peer's segment.
        length: Bytes of each piece, or of all of them, which is cheaper to check.

    Raises:
        ValueError: the offsets are not equally many, or not numbers of 63 bits.
    """
    try:
        ours, theirs = np.asarray(offsets, np.int64), np.asarray(peer_offsets, np.int64)
        if ours.ndim != 1 or ours.shape != theirs.shape:
            raise ValueError(f"{ours.shape} offsets and {theirs.shape} at the peer")
        numbers = np.empty((3, len(ours)), np.int64)
        numbers[0], numbers[1], numbers[2] = ours, length, theirs
    except OverflowError as error:
        raise ValueError("offsets and lengths are below 2**63") from error
    return Pieces(segment, numbers, length if isinstance(length, int) else None)


def require_allowed(allowed: Ranges, pieces: Pieces) -> None:
    """Check every piece before any of them is moved.

    Raises:
        ProtocolError: a range lies outside our segment or outside what the grant allows.
            The peer checks too; here the mistake has a stack trace.
    """
    num_bytes, length, numbers = pieces.segment.num_bytes, pieces.length, pieces.numbers
    if pieces.only is not None:
        offset, peer_offset, length = pieces.only
        is_inside = 0 <= offset <= num_bytes - length
        is_allowed = allowed.covers_one(peer_offset, length)
    elif length is not None:
        our_bits, length_bits, peer_bits = np.bitwise_or.reduce(numbers, axis=1).tolist()
        pieces.bits = our_bits | length_bits | peer_bits
        # No number is larger than all their bits, and those of a negative one are negative.
        last = num_bytes - length
        is_inside = our_bits >= 0 and (our_bits <= last or int(np.maximum.reduce(numbers[0])) <= last)
        is_allowed = allowed.covers_equal(numbers[2], length, peer_bits)
    else:
        ours, lengths, theirs = numbers
        is_inside = not np.count_nonzero(ours < 0)
        is_inside = is_inside and not np.count_nonzero(lengths > num_bytes - ours)
        is_allowed = allowed.covers(theirs, lengths)
    if not is_inside:
        raise ProtocolError("a request's range is not in our segment")
    if not is_allowed:
        raise ProtocolError("a request's range is not in the grant")
    pieces.peer_bound = allowed.end
