"""A pause lets tokens gather, and nothing else waits for it."""

import asyncio

import pytest

from base.errors import LostError
from base.messages import Failed, Tokens
from base.request import FinishReason, SampledToken
from bench.virtual_loop import run
from conductor.serving.nodes import Mailbox


def tokens(finish_reason=None):
    return Tokens("r", (SampledToken(1),), finish_reason)


def waits(put_after, pause_s=1.0):
    """Return when `next` gave what, with items put at their moments."""

    async def scenario(clock):
        mailbox = Mailbox()
        loop = asyncio.get_running_loop()
        for after_s, item in put_after:
            loop.call_later(after_s, mailbox.put, item)
        item = await mailbox.next(Tokens, pause_s)
        return clock.now_s(), item, len(mailbox.take_tokens())

    return run(scenario)


def test_tokens_that_come_in_a_pause_are_given_together_at_its_end():
    at_s, _, others = waits([(0.2, tokens()), (0.6, tokens()), (1.5, tokens())])
    assert (at_s, others) == (pytest.approx(1.0), 1)


def test_tokens_that_come_after_the_pause_are_given_at_once():
    at_s, _, others = waits([(1.5, tokens()), (2.0, tokens())])
    assert (at_s, others) == (pytest.approx(1.5), 0)


def test_the_last_tokens_end_the_pause():
    at_s, _, others = waits([(0.2, tokens()), (0.3, tokens(FinishReason.LENGTH))])
    assert (at_s, others) == (pytest.approx(0.3), 1)


def test_a_loss_ends_the_pause_and_what_came_before_it_is_given_first():
    async def scenario(clock):
        mailbox = Mailbox()
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, mailbox.put, tokens())
        loop.call_later(0.3, mailbox.put, Failed("r", LostError.__name__, "gone"))
        assert isinstance(await mailbox.next(Tokens, 1.0), Tokens)
        with pytest.raises(LostError, match="gone"):
            await mailbox.next(Tokens, 1.0)
        return clock.now_s()

    assert run(scenario) == pytest.approx(0.3)


def test_without_a_pause_each_message_is_given_as_it_comes():
    at_s, _, others = waits([(0.2, tokens()), (0.2, tokens())], pause_s=0.0)
    assert at_s == pytest.approx(0.2)
    assert others <= 1
