"""Counted gaps: their percentiles against those of all gaps, one by one."""

import random

import pytest

from bench.gap_counts import WIDTH, GapCounts
from tests.effort import counting


def test_percentiles_are_those_of_all_gaps_to_half_a_class() -> None:
    rng, gaps, counts = random.Random(1), [], GapCounts()
    for _ in range(300):
        longest_s, count = rng.uniform(0.004, 0.2), rng.randrange(1, 200)
        growth_s = rng.choice([0.0, 1e-7, 1e-5, longest_s / count])
        gaps += [longest_s - growth_s * step for step in range(count)]
        counts.add([(longest_s, count, growth_s)])
    gaps.sort()
    assert counts.num_gaps == len(gaps)
    assert counts.longest_s == gaps[-1]
    for percent in (1, 10, 50, 90, 99, 100):
        expected_s = gaps[max(0, -(-len(gaps) * percent // 100) - 1)]
        assert counts.percentile_s(percent) == pytest.approx(expected_s, rel=0.51 * WIDTH)


def test_memory_is_of_lengths_and_not_of_gaps() -> None:
    counts = GapCounts()
    with counting() as effort:
        for number in range(1_000):
            counts.add([(0.01 + 1e-6 * (number % 100), 500, 1e-9)])
    assert counts.num_gaps == 500_000
    assert effort.peak_bytes < 100_000


def test_nobody_has_gaps_of_no_tokens() -> None:
    counts = GapCounts()
    counts.add([])
    assert counts.percentile_s(99) == 0.0
