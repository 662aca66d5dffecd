"""The cluster's promises under faults, a thousand small worlds long, and that a seed is one world."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.world import run_seed

SEEDS = range(100)
"""Of every commit; `make test-full` runs the others of the first thousand."""
PART = 50
"""Seeds of one test, which takes some seconds on one core."""
ROOT = Path(__file__).parents[2]


def part(first):
    """Return what came of `PART` seeds, and what to tell of those that broke a promise."""
    outcomes = [run_seed(seed) for seed in range(first, first + PART)]
    return outcomes, "\n".join(outcome.report for outcome in outcomes if outcome.violation is not None)


@pytest.mark.parametrize("first", range(0, len(SEEDS), PART))
def test_whatever_goes_wrong_nothing_is_lost_and_nothing_wrong_is_told(first):
    outcomes, violations = part(first)
    assert not violations, violations
    kinds = Counter(line[1] for outcome in outcomes for line in outcome.lines)
    ends = Counter(line[3] for outcome in outcomes for line in outcome.lines if line[1] == "ended")
    # What does not happen cannot go wrong.
    assert min(kinds[kind] for kind in ("deed", "chance", "fault", "moves", "client")) > PART // 2
    assert ends["length"] + ends["stop"] > 2 * PART
    assert len(ends) > 4


@pytest.mark.full
@pytest.mark.parametrize("first", range(len(SEEDS), 1000, PART))
def test_the_rest_of_a_thousand_worlds_keeps_its_promises_too(first):
    _, violations = part(first)
    assert not violations, violations


def test_one_seed_is_one_world():
    assert run_seed(3).lines == run_seed(3).lines
    assert run_seed(3).lines != run_seed(4).lines


@pytest.mark.full
def test_one_seed_is_one_world_in_any_process():
    """Strings have other hashes there, so that whatever goes by the order of a set shows."""
    traces = []
    for hash_seed in "12":
        command = [sys.executable, "-m", "tests.simulation", "--trace", "--seeds", "30"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        traces.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True))
    assert traces[0].stdout.count(b"\n") > 1000
    assert traces[0].stdout == traces[1].stdout
