"""The projection of decode load against a count of all sequences."""

import random

import pytest

from conductor.placing.decode_projection import BUCKET_S, DECODE_TIMES, DecodeProjection


@pytest.mark.parametrize("seed", range(30))
def test_projection_agrees_with_a_count_of_those_whose_time_has_come_and_not_gone(seed: int) -> None:
    rng = random.Random(seed)
    projection = DecodeProjection(initial_decode_s=10.0)
    alive = []
    for _ in range(200):
        if alive and rng.random() < 0.4:
            projection.discard(*alive.pop(rng.randrange(len(alive))))
        else:
            # on bucket borders, where counting is exact
            alive.append((rng.randrange(100) * BUCKET_S, rng.randrange(1, 1_000)))
            projection.add(*alive[-1])
        moment_s = rng.randrange(120) * BUCKET_S
        present = [tokens for start_s, tokens in alive if moment_s - 10.0 < start_s <= moment_s]
        assert projection.at(moment_s) == (len(present), sum(present))


def test_decode_time_is_the_tail_of_those_seen() -> None:
    projection = DecodeProjection(initial_decode_s=30.0)
    for number in range(DECODE_TIMES):
        projection.observe(float(number % 100))
    assert projection.decode_s == pytest.approx(98.0, abs=1.5)
    for _ in range(DECODE_TIMES):
        projection.observe(5.0)
    assert projection.decode_s == 5.0


def test_nothing_is_left_of_what_was_discarded() -> None:
    projection = DecodeProjection(initial_decode_s=1e6)
    for number in range(50):
        projection.add(number * 0.3, number)
    for number in range(50):
        projection.discard(number * 0.3, number)
    assert projection.at(1e5) == (0, 0)
