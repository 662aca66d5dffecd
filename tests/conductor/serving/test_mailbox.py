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


@pytest.mark.parametrize("last", [tokens(FinishReason.LENGTH), Failed("r", LostError.__name__, "gone")])
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_who_is_to_read_soon_reads_at_once_when_the_last_message_comes(last, pause_s):
    async def scenario(clock):
        mailbox, due = Mailbox(), []
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, mailbox.put, tokens())
        loop.call_later(0.3, mailbox.put, last)
        async with asyncio.timeout(60):
            await mailbox.next(Tokens, pause_s, due.append)
        return clock.now_s(), len(due)

    assert run(scenario) == (pytest.approx(0.3), 1)


def test_a_reader_is_to_be_resolved_once_however_much_comes_before_it_is():
    async def scenario(_):
        mailbox, due = Mailbox(), []
        reader = asyncio.create_task(mailbox.next(Tokens, 0.0, due.append))
        await asyncio.sleep(0)
        for _ in range(3):
            mailbox.put(tokens())
        due[0].set_result(None)
        mailbox.put(tokens())
        await reader
        mailbox.put(tokens())
        return len(due), len(mailbox.take_tokens())

    assert run(scenario) == (1, 4)
