"""What a conductor finds when its process goes on after it stood still: dead streams, dead connections."""

import asyncio
import socket

import pytest

from base.errors import LostError, UnavailableError
from base.messages import Prefill, Tokens
from base.request import FinishReason
from base.wire import register
from conductor.placing.fair_queue import Criticality, Waiting
from conductor.placing.placement_queue import PlacementQueue
from conductor.placing.retries import MAX_ATTEMPTS, MAX_IDLE
from conductor.serving.waiting import wait_until_placed
from protos import nodes_pb2 as pb
from tests.conductor.dispatching import answer, conductor, request, until
from tests.conductor.scripted_node import ScriptedWork, node_info
from tests.simulation.loop import SimLoop


def given_up(address, **info):
    """Dial as a node does, register, and close before anybody has accepted."""
    host, _, port = address.rpartition(":")
    message = register(node_info(**info)).SerializeToString()
    with socket.create_connection((host, int(port))) as dialled:
        dialled.sendall(len(message).to_bytes(4, "little") + message)


async def test_connections_that_nodes_gave_up_before_they_were_accepted_get_no_request():
    async with conductor(role_wait_s=600.0) as running:
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: len(running.dispatcher.queue) == 1)
        for number in range(8):
            given_up(running.address, node_id=f"a{number}")
        await running.attach(ScriptedWork(), node_id="alive")
        assert await asking == ([11, 12, 13], FinishReason.LENGTH)
        assert [made.result.decode_node for made in running.seen.made] == ["alive"]


async def test_a_connection_that_was_given_up_does_not_end_the_stream_of_its_node():
    async with conductor() as running:
        work = ScriptedWork(silent_on=Prefill)
        await running.attach(work, node_id="a")
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await until(lambda: work.received)
        (session,) = running.membership.sessions
        given_up(running.address, node_id="a")
        # One that came later and is a member: what was dialled before it has been seen.
        await running.attach(ScriptedWork(), node_id="b")
        assert running.membership.session("a") is session
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


class Silent:
    """The end of a connection that lies open at a node which says nothing more, or of none."""

    is_choked = False
    peer_uris = ()

    def __init__(self, service):
        self.num_sent, self.is_over = 0, False
        self.end = service.stream()
        self.end.opened(self)

    def say(self, message):
        self.end.received(message.SerializeToString())

    def send(self, message):
        self.num_sent += 1

    def close(self, error=None):
        if not self.is_over:
            self.is_over = True
            self.end.closed(error)


async def lose_unheard(running, count):
    """Let so many nodes attach, each get the request that waits, and go without a word of it."""
    for number in range(count):
        dead = Silent(running.service)
        dead.say(register(node_info(node_id=f"a{number}")))
        dead.say(pb.NodeMessage())
        await until(lambda number=number: len(running.seen.made) == number + 1)
        dead.close(ConnectionResetError("reset"))
        await until(lambda number=number: len(running.seen.endings) == number + 1)


async def test_an_attempt_that_ended_before_its_node_said_anything_is_not_one_of_the_four():
    async with conductor(role_wait_s=600.0) as running:
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await lose_unheard(running, MAX_IDLE)
        # and two that count
        for number in range(2):
            lost = ScriptedWork(silent_on=Tokens)
            await running.attach(lost, node_id=f"b{number}")
            await until(lambda number=number: len(running.seen.firsts) == number + 1)
            running.clients[f"b{number}"].cancel()
            await until(lambda number=number: len(running.seen.endings) == MAX_IDLE + number + 1)
        await running.attach(ScriptedWork(), node_id="alive")
        tokens, finish = await asking
        assert (tokens[-2:], finish) == ([12, 13], FinishReason.LENGTH)


async def test_attempts_without_a_word_are_bounded():
    async with conductor(role_wait_s=600.0) as running:
        asking = asyncio.ensure_future(answer(running.dispatcher, request()))
        await lose_unheard(running, MAX_IDLE + MAX_ATTEMPTS)
        with pytest.raises(LostError):
            await asking


class JumpingClock:
    """The loop's time, and what it jumped by."""

    def __init__(self, loop):
        self._loop, self.jumped_s = loop, 0.0

    def now_s(self):
        return self._loop.time() + self.jumped_s


def test_the_time_that_the_process_stood_is_not_waited_for_a_role():
    loop = SimLoop(lambda: (0.0, True))
    clock = JumpingClock(loop)
    ended_at_s = []

    async def wait():
        queue = PlacementQueue(8, 10.0, lambda decodes: "decode", lambda: 1, clock.now_s())
        item = Waiting("r", Criticality.STANDARD, "", 0.0, 1.0)
        loop.call_later(5.0, setattr, clock, "jumped_s", 30.0)
        with pytest.raises(UnavailableError):
            await wait_until_placed(queue, item, lambda ahead_s: False, float("inf"), 600.0, clock)
        ended_at_s.append(loop.time())

    try:
        loop.run_until_complete(wait())
    finally:
        loop.close()
    assert not loop.violations
    assert ended_at_s == [20.0]
