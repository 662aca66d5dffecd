"""What a caller asks becomes pieces."""

import random

import pytest

from base.errors import ProtocolError
from base.grants import Operation
from transfer import segment as segments
from transfer.batch import Piece, TransferRequest, plan_pieces, split_pieces
from transfer.ranges import ranges_of

OURS = segments.over(1, bytearray(1000))


def planned(
    operation: Operation, offsets: tuple[int, ...], length: int, requests: list[TransferRequest]
) -> list[Piece]:
    return plan_pieces(operation, ranges_of(offsets, length), requests)


def spans(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.offset, piece.peer_offset, piece.length) for piece in pieces]


def test_neighbours_on_both_sides_become_one_piece() -> None:
    requests = [TransferRequest(OURS, 10 * i, 100 + 10 * i, 10) for i in range(4)]
    assert spans(planned(Operation.WRITE, (100, 110, 120, 130), 10, requests)) == [(10 * 0, 100, 40)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    requests = [TransferRequest(OURS, 0, 100, 10), TransferRequest(OURS, 10, 200, 10)]
    pieces = planned(Operation.WRITE, (100, 200), 10, requests)
    assert spans(pieces) == [(0, 100, 10), (10, 200, 10)]


def test_a_read_puts_into_our_segment_what_lies_at_the_source() -> None:
    pieces = planned(Operation.READ, (500,), 10, [TransferRequest(OURS, 500, 20, 10)])
    assert spans(pieces) == [(20, 500, 10)]


@pytest.mark.parametrize(
    ("source", "target", "length"), [(0, 99, 5), (0, 108, 5), (995, 100, 10), (-1, 100, 5), (0, 100, 0)]
)
def test_a_range_outside_segment_or_grant_is_refused_here(source: int, target: int, length: int) -> None:
    with pytest.raises(ProtocolError):
        planned(Operation.WRITE, (100,), 10, [TransferRequest(OURS, source, target, length)])


@pytest.mark.parametrize("seed", range(30))
def test_groups_hold_every_byte_once_and_keep_their_bounds(seed: int) -> None:
    rng = random.Random(seed)
    offsets = tuple(range(0, 1000, 10))
    starts = rng.sample(range(100), 40)
    requests = [TransferRequest(OURS, start * 10, start * 10, 10) for start in starts]
    pieces = planned(Operation.WRITE, offsets, 10, requests)
    groups = split_pieces(pieces, max_bytes=rng.choice([7, 10, 64, 1000]), max_pieces=rng.choice([1, 3, 50]))
    moved = [
        at for group in groups for piece in group for at in range(piece.offset, piece.offset + piece.length)
    ]
    assert moved == [at for start in starts for at in range(start * 10, start * 10 + 10)]
    assert all(piece.offset == piece.peer_offset for group in groups for piece in group)
