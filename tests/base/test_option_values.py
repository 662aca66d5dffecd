"""Numbers of command lines are read within their bounds, or refused with what is wanted."""

import argparse

import pytest

from base.option_values import real, whole


@pytest.mark.parametrize("text", ["0", "-5", "65", "1.5", "x", "", "9" * 10_000, "nan"])
def test_a_number_that_is_not_whole_or_not_within_its_bounds_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a whole number from 1 to 64 is wanted") as caught:
        whole(1, 64)(text)
    assert len(str(caught.value)) < 200


def test_bounds_themselves_are_numbers_that_may_be():
    assert [whole(1, 64)(text) for text in ("1", "64")] == [1, 64]
    assert [real(0, 1)(text) for text in ("0", "1", "0.5")] == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "0", "1e400", "x", "1" * 50])
def test_a_number_past_its_bounds_or_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="more than 0, not infinite is wanted"):
        real(0, above=True)(text)


def test_infinity_is_taken_where_it_means_something():
    assert real(0, finite=False)("inf") == float("inf")
    with pytest.raises(argparse.ArgumentTypeError, match="at most 2"):
        real(0, 2)("inf")
