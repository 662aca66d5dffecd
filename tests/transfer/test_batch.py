"""What a caller asks becomes pieces."""

import random

import numpy as np
import pytest

from base.errors import ProtocolError
from transfer.batch import Pieces, pieces_of, require_allowed
from transfer.owned import segment as segments
from transfer.owned.ranges import ranges_of, with_table

OURS = segments.over(1, bytearray(1000))


def checked(offsets: tuple[int, ...], length: int, pieces: Pieces) -> Pieces:
    require_allowed(ranges_of(offsets, length), pieces)
    return pieces


def test_neighbours_on_both_sides_become_one_piece() -> None:
    targets = (100, 110, 120, 130)
    pieces = checked(targets, 10, pieces_of(OURS, (0, 10, 20, 30), targets, 10))
    assert list(pieces.merged().rows()) == [(0, 100, 40)]


def test_neighbours_on_one_side_only_stay_apart() -> None:
    pieces = checked((100, 200), 10, pieces_of(OURS, (0, 10), (100, 200), 10))
    assert list(pieces.merged().rows()) == [(0, 100, 10), (10, 200, 10)]


def test_runs_between_gaps_become_one_piece_each() -> None:
    sources, targets = (0, 10, 30, 40, 60), (100, 110, 120, 130, 200)
    pieces = checked((100, 110, 120, 130, 200), 10, pieces_of(OURS, sources, targets, 10))
    assert list(pieces.merged().rows()) == [(0, 100, 20), (30, 120, 20), (60, 200, 10)]


def test_a_batch_keeps_what_it_was_given_when_the_callers_arrays_change() -> None:
    offsets = np.array([0, 100])
    batch = pieces_of(OURS, offsets, offsets, 10)
    offsets[:] = 999
    assert list(checked((0, 100), 10, batch).rows()) == [(0, 0, 10), (100, 100, 10)]


@pytest.mark.parametrize(
    ("source", "target", "length"),
    [(0, 99, 5), (0, 108, 5), (995, 100, 10), (-1, 100, 5), (0, 100, 0), (0, 100, (1 << 63) - 1)],
)
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("is_alike", [False, True])
def test_a_range_outside_segment_or_grant_is_refused_here(
    source: int, target: int, length: int, others: int, is_alike: bool
) -> None:
    lengths = length if is_alike else [length] + [10] * others
    batch = pieces_of(OURS, [source] + [50] * others, [target] + [100] * others, lengths)
    for allowed in (ranges_of((100,), 10), with_table(ranges_of((100,), 10))):
        with pytest.raises(ProtocolError):
            require_allowed(allowed, batch)


def test_requests_of_one_length_are_planned_as_any_others() -> None:
    """Random ones, most of them inside: both ways of asking have one answer."""
    rng = random.Random(3)
    for _ in range(300):
        unit, first = rng.choice([1, 4, 16, 10]), rng.choice([0, 0, 3])
        granted = [first + unit * block for block in rng.sample(range(40), rng.randrange(1, 20))]
        length = rng.choice([unit, unit, unit // 2, 2 * unit, 0])
        targets = [rng.choice(granted) + rng.choice([0, 0, 0, unit // 2]) for _ in range(rng.randrange(1, 5))]
        sources = [rng.choice([0, unit, 992, 1000 - length]) for _ in targets]
        for allowed in (ranges_of(granted, unit), with_table(ranges_of(granted, unit))):
            outcomes = []
            for lengths in (length, [length] * len(targets)):
                try:
                    pieces = pieces_of(OURS, sources, targets, lengths)
                    require_allowed(allowed, pieces)
                    outcomes.append(list(pieces.rows()))
                except ProtocolError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("sources", "targets", "length"), [((0, 1), (0,), 1), ((0,), (0,), (1, 2)), ((1 << 63,), (0,), 1)]
)
def test_what_is_no_list_of_requests_is_a_value_error(sources, targets, length) -> None:
    with pytest.raises(ValueError, match=r"offsets|below|broadcast"):
        pieces_of(OURS, sources, targets, length)


def whole(rng: random.Random) -> Pieces:
    starts = [start * 10 for start in rng.sample(range(100), 40)]
    batch = pieces_of(OURS, starts, starts, 10)
    return checked(tuple(range(0, 1000, 10)), 10, batch).merged()


def moved(pieces: Pieces) -> list[int]:
    """Return every byte that is moved, in order; asserts that it stays in its place."""
    assert (pieces.offsets == pieces.peer_offsets).all()
    return [at for offset, _, length in pieces.rows() for at in range(offset, offset + length)]


@pytest.mark.parametrize("seed", range(30))
def test_groups_hold_every_byte_once_and_keep_their_bounds(seed: int) -> None:
    rng = random.Random(seed)
    pieces = whole(rng)
    max_bytes, max_pieces = rng.choice([7, 10, 64, 1000]), rng.choice([1, 3, 50])
    groups = pieces.grouped(max_bytes, max_pieces)
    assert [at for group in groups for at in moved(group)] == moved(pieces)
    assert all(len(group) <= max_pieces and group.num_bytes <= max_bytes for group in groups)


@pytest.mark.parametrize("seed", range(10))
def test_cut_pieces_are_short_and_whole_together(seed: int) -> None:
    pieces = whole(random.Random(seed))
    for max_bytes in (1, 7, 10, 33, 1000):
        parts = pieces.cut(max_bytes)
        assert moved(parts) == moved(pieces)
        assert int(parts.lengths.max()) <= max_bytes
