"""The account of an attempt: what its gaps were, and what its steps took."""

import pytest

from base.messages import Prefilled, PrefillTimes
from base.request import SampledToken
from conductor.serving.request_state import RequestState
from tests.conductor.dispatching import request
from tests.manual_clock import ManualClock


def account(*pieces, attempts=1):
    """The account of an attempt whose first token was followed by (seconds later, tokens)."""
    clock = ManualClock()
    state = RequestState(request(max_tokens=100), 60.0, clock)
    for _ in range(attempts):
        state.begin_attempt()
        state.add_first(_prefilled(state), None)
        for seconds, num_tokens in pieces:
            clock.advance(seconds)
            state.decoded(num_tokens)
            state.add(tuple(SampledToken(1) for _ in range(num_tokens)), None)
    return state.actual("finished")


def _prefilled(state):
    told = Prefilled(state.attempt_id, SampledToken(1), None, 0, (), PrefillTimes(0.0, 0.1, 0.0))
    state.prefilled(told)
    return told


def test_the_gap_in_which_a_sequence_joins_is_none_of_its_steps():
    actual = account((0.5, 1), (0.1, 1), (0.1, 1))
    assert actual.mean_tbt_s == pytest.approx(0.7 / 3)
    assert actual.mean_step_s == pytest.approx(0.1)


def test_tokens_that_come_together_are_as_many_steps():
    actual = account((0.5, 3), (0.4, 4))
    assert actual.num_output_tokens == 8
    assert actual.mean_step_s == pytest.approx(0.1)


@pytest.mark.parametrize("pieces", [(), [(0.5, 1)], [(0.5, 4)]])
def test_an_answer_that_came_whole_with_its_second_token_says_nothing_of_steps(pieces):
    assert account(*pieces).mean_step_s is None


def test_each_attempt_has_its_own_first_gap():
    actual = account((0.5, 1), (0.1, 2), attempts=2)
    assert actual.num_output_tokens == 4
    assert actual.mean_step_s == pytest.approx(0.05)
