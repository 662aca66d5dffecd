"""Messages to a node gather while the event loop has others to serve, and wait for nothing else."""

import asyncio

import pytest

from base.clock import ManualClock
from base.messages import Release
from base.request import RequestId
from conductor.nodes import IDLE_TURN_S, MAX_GATHER_S, NodeSession
from tests.conductor.builders import make_info

BUSY_TURN_S = 3 * IDLE_TURN_S


async def said_together(turns, turn_s):
    """Return how many of the items, one said in each turn of the loop, are in the first message, and the
    seconds that it waited."""
    clock, session = ManualClock(), NodeSession(make_info("p"))

    async def say():
        for turn in range(turns):
            session.send(Release(RequestId(str(turn))))
            clock.advance(turn_s)
            await asyncio.sleep(0)

    session.send(Release(RequestId("first")))
    saying = asyncio.create_task(say())
    items = await session.outgoing(1.0, clock)
    waited_s = clock.now_s()
    await saying
    return len(items), waited_s


async def test_what_is_said_while_the_loop_is_busy_goes_in_one_message():
    assert (await said_together(8, BUSY_TURN_S))[0] == 9


async def test_a_loop_with_nothing_else_to_do_sends_at_once():
    assert (await said_together(8, 0.0))[0] == 2


async def test_a_loop_that_stays_busy_sends_in_time():
    num_items, waited_s = await said_together(10_000, BUSY_TURN_S)
    assert waited_s == pytest.approx(MAX_GATHER_S, abs=2 * BUSY_TURN_S)
    assert num_items < 100


async def test_nothing_said_is_nothing_to_send():
    assert await NodeSession(make_info("p")).outgoing(0.0, ManualClock()) == []
