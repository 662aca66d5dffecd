"""What the clients of a steady load make of what they saw."""

import pytest

from bench.faults.asking import Answer
from bench.faults.steady import Asked, Window, longest_gap_s, summed, take_event

EXPECTED = [3, 1, 4, 1, 5]


def asked(sent_at_s, tokens=EXPECTED, error=""):
    return Asked(Answer(sent_at_s, list(tokens), [sent_at_s + 0.25 for _ in tokens], error), EXPECTED)


@pytest.mark.parametrize(
    ("times_s", "longest_s"),
    [([], 10.0), ([11.0, 12.0], 8.0), ([14.0, 11.0, 19.5], 5.5), ([5.0, 15.0, 25.0], 5.0)],
)
def test_the_ends_of_the_time_looked_at_bound_its_longest_gap(times_s, longest_s):
    assert longest_gap_s(times_s, 10.0, 20.0) == longest_s


def test_a_request_sent_before_the_fault_failed_in_progress_and_others_afterwards():
    window = Window(10.0, 20.0, [asked(9.0, [], "gone"), asked(10.2, [], "gone"), asked(11.0)], [])
    assert (window.failed_in_progress, window.failed_afterwards) == (1, 1)
    window.dead_at_s = 10.3
    assert (window.failed_in_progress, window.failed_afterwards) == (2, 0)


def test_the_time_to_serve_ends_with_a_new_request_that_is_answered_whole():
    sent_before, broken_off, whole = asked(9.9), asked(11.0, EXPECTED[:2], "gone"), asked(17.0)
    assert Window(10.0, 20.0, [sent_before, broken_off, whole], []).without_answer_s == 7.25
    assert Window(10.0, 20.0, [sent_before, broken_off], []).without_answer_s == 10.0


@pytest.mark.parametrize(
    ("tokens", "error", "differs"),
    [
        (EXPECTED, "", False),
        (EXPECTED[:4], "", True),
        ([*EXPECTED, 9], "", True),
        (EXPECTED[:2], "gone", False),
        ([3, 4], "gone", True),
        ([], "gone", False),
    ],
)
def test_an_answer_that_was_broken_off_is_compared_as_far_as_it_came(tokens, error, differs):
    assert asked(0.0, tokens, error).differs is differs


def test_faults_of_a_kind_are_counted_together():
    first = Window(10.0, 12.0, [asked(9.0, [], "gone"), asked(10.75)], [10.5, 11.0, 11.5])
    second = Window(20.0, 24.0, [asked(22.75, [7]), asked(23.0, [], "late")], [23.0])
    row = summed([first, second])
    assert (row["injected"], row["requests"], row["answers_that_differ"]) == (2, 4, 1)
    assert (row["failed_in_progress"], row["failed_afterwards"]) == (1, 1)
    assert (row["without_new_answer_s_median"], row["without_new_answer_s_max"]) == (2.0, 3.0)
    assert row["without_connection_s_max"] == 3.0
    assert row["errors"] == {"gone": 1, "late": 1}


def test_events_give_their_tokens_and_an_error_is_raised():
    answer = Answer(0.0)
    for ids in ([], [3, 1], [4]):
        take_event(answer, {"choices": [{"text": "x", "token_ids": ids}]})
    take_event(answer, {"choices": [{"text": "", "finish_reason": "length"}]})
    assert (answer.tokens, len(answer.arrived_at_s)) == ([3, 1, 4], 2)
    with pytest.raises(ValueError, match="nobody is left"):
        take_event(answer, {"error": {"message": "nobody is left"}})
