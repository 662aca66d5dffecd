"""The account of an attempt: what its gaps were, and what its steps took."""

import asyncio

import pytest

from base.messages import Prefilled, PrefillTimes, Tokens
from base.request import FinishReason, SampledToken
from bench.virtual_loop import run
from conductor.serving.request_state import RequestState
from tests.conductor.dispatching import request


def account(*messages, attempts=1, pause_s=0.0):
    """The account of an attempt whose first token was followed by messages of (seconds later, tokens).

    `pause_s`: those that are not the last are read so many seconds after the ones before.
    """

    async def scenario(clock):
        state = RequestState(request(max_tokens=100), 60.0, clock)
        for _ in range(attempts):
            state.begin_attempt()
            state.add_first(_prefilled(state), None)
            left = _send(state, messages)
            while left:
                read = await state.mailbox.next(Tokens, pause_s - state.since_last_s)
                came = [read, *state.mailbox.take_tokens()]
                left -= len(came)
                state.decoded()
                state.add(sum((message.tokens for message in came), ()), came[-1].finish_reason)
        return state.actual("finished")

    return run(scenario)


def _send(state, messages):
    """Have a node's messages come; return how many."""
    after_s = 0.0
    for number, (seconds, num_tokens) in enumerate(messages, 1):
        after_s += seconds
        reason = FinishReason.LENGTH if number == len(messages) else None
        tokens = Tokens(state.attempt_id, (SampledToken(1),) * num_tokens, reason)
        asyncio.get_running_loop().call_later(after_s, state.mailbox.put, tokens)
    return len(messages)


def _prefilled(state):
    first = Prefilled(state.attempt_id, SampledToken(1), None, 0, (), PrefillTimes(0.0, 0.1, 0.0))
    state.prefilled(first)
    return first


def test_the_gap_in_which_a_sequence_joins_is_none_of_its_steps():
    actual = account((0.5, 1), (0.1, 1), (0.1, 1))
    assert actual.mean_tbt_s == pytest.approx(0.7 / 3)
    assert actual.mean_step_s == pytest.approx(0.1)


def test_tokens_that_come_together_are_as_many_steps():
    actual = account((0.5, 3), (0.4, 4))
    assert actual.num_output_tokens == 8
    assert actual.mean_step_s == pytest.approx(0.1)


def test_steps_are_those_of_the_node_however_late_their_tokens_are_read():
    actual = account((0.5, 1), (0.2, 1), (0.2, 1), (0.1, 1), pause_s=0.8)
    assert actual.num_output_tokens == 5
    assert actual.mean_step_s == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("messages", [(), [(0.5, 1)], [(0.5, 4)]])
def test_an_answer_that_came_whole_with_its_second_token_says_nothing_of_steps(messages):
    assert account(*messages).mean_step_s is None


def test_each_attempt_has_its_own_first_gap():
    actual = account((0.5, 1), (0.1, 2), attempts=2)
    assert actual.num_output_tokens == 4
    assert actual.mean_step_s == pytest.approx(0.05)
