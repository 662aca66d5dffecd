"""Every reader of foreign bytes, for a moment: `python -m tests.fuzz` goes on for as long as is asked."""

import random

import pytest

from tests.effort import counting
from tests.fuzz.mutations import FoundError, corpus, finding_or_none, mutated, tried
from tests.fuzz.targets import TARGETS, Target

INPUTS = 40
MAX_LINES = 200_000
MAX_LINES_A_BYTE = 100
MAX_BYTES = 4 << 20
MAX_GROWTH = 10
"""Bytes held at once for each byte of an input, beside those that any input may take."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_before_and_some_changed_inputs_are_taken_or_refused(name):
    target, rng = TARGETS[name], random.Random(name)
    inputs = corpus(name, target)
    changed = [mutated(rng, inputs, target.words) for _ in range(INPUTS)]
    for data in inputs + changed:
        with counting() as effort:
            found = finding_or_none(name, target, data)
        assert found is None
        assert effort.lines <= MAX_LINES + MAX_LINES_A_BYTE * len(data), data
        assert effort.peak_bytes <= MAX_BYTES + MAX_GROWTH * len(data), data


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_seed_is_a_good_input(name):
    target = TARGETS[name]
    refused = None
    try:
        target.read(target.seeds[0])
    except target.refusals as error:
        refused = error
    assert refused is None


def test_another_error_than_a_refusal_is_a_finding():
    target = Target(lambda data: data.decode(), [b"x"], (ValueError,))
    assert finding_or_none("text", target, b"\xff") is None
    with pytest.raises(FoundError, match="ZeroDivisionError"):
        tried("division", Target(lambda data: 1 / len(data), [b"x"]), b"")
