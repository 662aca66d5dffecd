"""A node's pace is learned from what it did alone, or from a whole run of prompts."""

import random

import pytest

from conductor.placing.prefill_pace import RUN_LENGTH, PrefillPace


def test_a_prompt_that_was_alone_tells_the_nodes_own_seconds():
    pace = PrefillPace()
    pace.placed("n", 1.0)
    assert pace.done("n", 9.0, profile_s=2.0, compute_s=3.0) == (2.0, 3.0, 1)


def test_prompts_computed_together_are_taken_together():
    pace = PrefillPace()
    pace.placed("n", 1.0)
    pace.placed("n", 1.5)
    assert pace.done("n", 6.0, profile_s=2.0, compute_s=5.0) is None
    assert pace.done("n", 7.0, profile_s=1.0, compute_s=5.5) == (3.0, 6.0, 2)


def test_a_run_with_a_lost_prompt_teaches_nothing_and_the_next_one_does():
    pace = PrefillPace()
    pace.placed("n", 0.0)
    pace.placed("n", 0.0)
    pace.lost("n", 1.0)
    assert pace.done("n", 2.0, 1.0, 1.0) is None
    pace.placed("n", 3.0)
    assert pace.done("n", 4.0, 0.5, 1.0) == (0.5, 1.0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_is_never_idle_shows_its_true_pace(seed):
    rng = random.Random(seed)
    pace, now_s, told = PrefillPace(), 0.0, []
    waiting = [rng.uniform(0.1, 1.0) for _ in range(3)]
    for _ in waiting:
        pace.placed("n", now_s)
    for _ in range(10 * RUN_LENGTH):
        profile_s = waiting.pop(0)
        now_s += 1.7 * profile_s
        pace.placed("n", now_s)
        waiting.append(rng.uniform(0.1, 1.0))
        told.append(pace.done("n", now_s, profile_s, compute_s=99.0))
    measured = [each for each in told if each is not None]
    assert len(measured) == 10
    for profile_s, measured_s, _ in measured:
        assert measured_s == pytest.approx(1.7 * profile_s)
