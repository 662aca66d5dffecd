"""The projection of decode load against the survivors of a count of all sequences."""

import random

import pytest

from conductor.placing.decode_projection import BUCKET_S, LENGTHS, DecodeProjection


@pytest.mark.parametrize("seed", range(30))
def test_before_any_ended_each_is_expected_to_have_the_initial_tokens(seed: int) -> None:
    rng = random.Random(seed)
    projection = DecodeProjection(256.0, 10.0 / 256)
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
        assert projection.at(moment_s, 0.0) == (len(present), sum(present))


def test_mean_decode_time_is_that_of_the_lengths_seen_lately() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for number in range(LENGTHS):
        projection.observe(2.0 * (number % 64), number % 64)
    assert projection.decode_s == pytest.approx(2 * 31.5)
    for _ in range(LENGTHS):
        projection.observe(10.0, 5)
    assert projection.decode_s == pytest.approx(2 * 5.0)


def test_a_token_takes_as_long_as_those_of_the_last_requests() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for _ in range(LENGTHS):
        projection.observe(5.0, 250)
    assert projection.decode_s == pytest.approx(5.0)
    for _ in range(80):
        projection.observe(1.5, 250)
    assert projection.decode_s == pytest.approx(1.5, rel=0.02)


def test_a_token_of_a_short_answer_counts_as_one_of_a_long_one() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for _ in range(LENGTHS):
        projection.observe(0.2, 1)
        projection.observe(10.0, 1_000)
    # of 0.2 and 0.01 seconds; the last request counts a sixteenth more
    assert projection.token_s == pytest.approx(10.2 / 1_001, rel=0.01)


def test_one_short_answer_changes_little_of_what_is_predicted() -> None:
    projection = DecodeProjection(256.0, 0.01)
    assert not projection.is_timed
    projection.predict(0.02)
    assert projection.token_s == 0.02
    projection.observe(1.0, 1)
    assert projection.is_timed
    assert projection.token_s == pytest.approx(0.024, rel=0.01)


def test_an_output_of_one_token_or_of_one_moment_says_nothing_of_how_long_one_takes() -> None:
    projection = DecodeProjection(256.0, 2.0)
    projection.observe(9.0, 0)
    projection.observe(0.0, 9)
    assert projection.decode_s == 2.0 * 256
    projection.add(0.0, 1_000)
    assert projection.at(1.0, 0.0) == (1.0, 1_000.0)


def projection_of_two_lengths() -> DecodeProjection:
    projection = DecodeProjection(256.0, 1.0)
    for number in range(LENGTHS):
        length = 2 if number % 4 else 20
        projection.observe(float(length), length)
    return projection


def test_as_many_survive_as_of_those_that_ended() -> None:
    projection = projection_of_two_lengths()
    projection.add(100.0, 1_000)
    assert projection.at(101.0, 90.0) == (1.0, 1_000.0)
    assert projection.at(110.0, 90.0) == (0.25, 250.0)
    assert projection.at(121.0, 90.0) == (0.0, 0.0)


def test_one_that_has_come_so_far_is_expected_to_go_further() -> None:
    projection = projection_of_two_lengths()
    projection.add(100.0, 1_000)
    # a quarter is expected ten seconds on; of those that are there after five, all
    assert projection.at(110.0, 105.0) == (1.0, 1_000.0)
    # longer than any that was seen: nothing is known of its end
    assert projection.at(200.0, 130.0) == (1.0, 1_000.0)


@pytest.mark.parametrize("start_s", [100.0, 100.1, 100.3, 100.49])
def test_ages_are_not_rounded(start_s: float) -> None:
    projection = DecodeProjection(256.0, 1.0)
    for _ in range(LENGTHS):
        projection.observe(1.7, 1)
    for _ in range(3):
        projection.add(start_s, 10)
    assert projection.at(start_s + 1.69, 90.0) == (3.0, 30.0)
    assert projection.at(start_s + 1.71, 90.0) == (0.0, 0.0)


def test_expected_number_is_the_mean_of_many_runs() -> None:
    rng = random.Random(1)
    projection = DecodeProjection(256.0, 1.0)
    for _ in range(LENGTHS):
        length = 1 + int(1_000 * rng.expovariate(0.1))
        projection.observe(length / 1_000, length)
    starts = [rng.randrange(160) * BUCKET_S for _ in range(400)]
    for start_s in starts:
        projection.add(start_s, 10)
    expected, tokens = projection.at(80.0, 0.0)
    runs = [sum(start_s + rng.expovariate(0.1) > 80.0 for start_s in starts) for _ in range(200)]
    assert expected == pytest.approx(sum(runs) / len(runs), rel=0.15)
    assert tokens == pytest.approx(10 * expected)


def test_nothing_is_left_of_what_was_discarded() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for number in range(50):
        projection.add(number * 0.3, number)
    for number in range(50):
        projection.discard(number * 0.3, number)
    assert projection.at(100.0, 0.0) == (0, 0)


def test_a_short_answer_is_of_a_length_that_one_of_fifty_is_shorter_than() -> None:
    projection = DecodeProjection(256.0, 1.0)
    assert projection.mean_over_short == 1.0, "nothing is known"
    for number in range(LENGTHS):
        projection.observe(1.0, 10 if number < LENGTHS // 100 else 40 if number < LENGTHS // 10 else 100)
    mean = (10 * 2 + 40 * 23 + 100 * 231) / LENGTHS
    assert projection.mean_over_short == pytest.approx(mean / 40)


def test_answers_of_one_token_leave_a_ratio_of_at_least_one() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for _ in range(LENGTHS):
        projection.observe(0.0, 0)
    assert projection.mean_over_short == 1.0


def test_answers_of_one_token_are_no_short_ones() -> None:
    projection = DecodeProjection(256.0, 1.0)
    for number in range(LENGTHS):
        projection.observe(1.0, 0 if number < LENGTHS // 16 else 100)
    assert projection.mean_over_short == pytest.approx(1.0)
