"""What the rows of the fault matrix are counted with."""

import json
import random
import sys

import pytest

from bench.faults.__main__ import ROWS, main
from bench.faults.asking import Answer, Seen
from bench.faults.samples import ks_p_value, pooled_slope

EXPECTED = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("tokens", "wrong", "repeated"),
    [
        ([3, 1, 4, 1, 5], 0, 0),
        ([3, 1, 4, 1], 1, 0),
        ([3, 1, 1, 4, 1, 5], 3, 1),
        ([3, 1, 4, 1, 5, 5], 0, 1),
        ([], 5, 0),
    ],
)
def test_lost_and_repeated_tokens_are_counted(tokens, wrong, repeated):
    seen = Seen()
    seen.take(Answer(0.0, tokens, [float(at) for at in range(len(tokens))]), EXPECTED)
    assert (seen.requests, seen.failed, seen.wrong_tokens, seen.repeated_tokens) == (1, 0, wrong, repeated)


def test_an_answer_that_failed_counts_as_failed_and_the_longest_gap_is_kept():
    seen = Seen()
    seen.take(Answer(0.0, [3], [2.0], "UNAVAILABLE: gone"), EXPECTED)
    seen.take(Answer(1.0, EXPECTED, [1.5, 1.6, 4.0]), EXPECTED)
    assert (seen.requests, seen.failed, seen.wrong_tokens) == (2, 1, 0)
    assert seen.longest_gap_s == pytest.approx(2.4)
    assert seen.errors == ["UNAVAILABLE: gone"]


def test_two_samples_of_one_distribution_are_not_distinguished_and_shifted_ones_are():
    rng = random.Random(1)
    first, second = ([rng.gauss(10, 1) for _ in range(200)] for _ in range(2))
    assert ks_p_value(first, second) > 0.01
    assert ks_p_value(first, first) == 1.0
    assert ks_p_value(first, [value + 1 for value in second]) < 1e-6


def test_a_slope_is_that_of_lines_of_any_level():
    lines = [[(x, 2.5 * x + level) for x in range(first, first + 5)] for first, level in ((0, -1), (20, 7))]
    assert pooled_slope(lines) == pytest.approx(2.5)
    assert pooled_slope([[(0, 5.0), (1, 5.0)]]) == 0.0


def test_a_row_that_is_measured_again_replaces_its_figures_and_no_other_row(tmp_path, monkeypatch):
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"soak": {"injected": 1}, "spare-killed": {"injected": 2}}))
    monkeypatch.setitem(ROWS, "spare-killed", (lambda count: {"injected": count}, 20))
    monkeypatch.setattr(sys, "argv", ["faults", "--times", "3", "spare-killed", "--json", str(file)])
    main()
    table = json.loads(file.read_text())
    assert (table["soak"], table["spare-killed"]["injected"]) == ({"injected": 1}, 3)
