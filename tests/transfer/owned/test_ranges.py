"""What a grant covers, against its definition: a set of bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.errors import ProtocolError
from transfer.owned.ranges import MAX_TABLE, Ranges, ranges_of, with_table


def covers(ranges: Ranges, *requests: tuple[int, int]) -> bool:
    """Asked in each way there is."""
    offsets, lengths = np.array(requests, np.int64).T
    each = []
    for offset, length in requests:
        alone = np.array([offset, offset], np.int64)
        each += [
            ranges.covers_one(offset, length),
            ranges.covers_equal(alone, length, offset),
            ranges.covers(alone, length),
        ]
    is_covered = ranges.covers(offsets, lengths)
    assert all(each) == is_covered
    assert each[::3] == each[1::3] == each[2::3]
    return is_covered


@given(
    blocks=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    scale=st.sampled_from([1, 3, 8]),
    length=st.integers(1, 9),
    requests=st.lists(st.tuples(st.integers(-3, 120), st.integers(-1, 30)), min_size=1, max_size=4),
    shift=st.sampled_from([0, 7, MAX_TABLE * 100]),
)
@settings(max_examples=150, deadline=None)
def test_requests_are_covered_if_each_lies_in_one_run_of_granted_bytes(
    blocks: list[int], scale: int, length: int, requests: list[tuple[int, int]], shift: int
) -> None:
    """`shift` puts one range so far away that no table is made."""
    offsets = [block * scale for block in blocks] + [shift]
    granted = {byte for offset in offsets for byte in range(offset, offset + length)}
    expected = all(
        count > 0 and granted.issuperset(range(offset, offset + count)) for offset, count in requests
    )
    ranges = ranges_of(offsets, length)
    assert covers(ranges, *requests) == expected
    assert covers(with_table(ranges), *requests) == expected


@pytest.mark.parametrize(
    "request_", [(0, (1 << 63) - 1), (-(1 << 63), 1), ((1 << 63) - 1, 1), (8, -(1 << 63)), (1 << 62, 1 << 62)]
)
def test_numbers_that_wrap_around_are_not_covered(request_: tuple[int, int]) -> None:
    for offsets in ([0], [0, 100], [0, 100 * MAX_TABLE]):
        for ranges in (ranges_of(offsets, 16), with_table(ranges_of(offsets, 16))):
            assert not covers(ranges, request_)
            assert not covers(ranges, (0, 16), request_)


@pytest.mark.parametrize(
    ("offsets", "length"), [([], 1), ([0], 0), ([0], -1), ([-1], 5), ([1 << 64], 1), ([(1 << 63) - 1], 2)]
)
def test_a_grant_of_no_bytes_or_beyond_63_bits_is_refused(offsets: list[int], length: int) -> None:
    with pytest.raises(ProtocolError):
        ranges_of(offsets, length)
