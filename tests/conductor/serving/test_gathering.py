"""What is said to a node in one turn of the event loop leaves in one message, at the end of that turn.

If it is not much, and somebody waits for it.
"""

import asyncio
from functools import partial

import pytest

from base.block_hash import BlockHash
from base.errors import InvalidRequestError
from base.messages import Prefilled, Registered, Release, Reserve, Start, Work
from base.request import RequestId, SamplingParams, StopParams
from base.wire import register, to_node_from
from conductor.serving.attach import MOST_TOGETHER, RELEASE_S, AttachService
from conductor.serving.membership import Membership
from conductor.serving.nodes import Mailbox
from protos import nodes_pb2 as pb
from tests.conductor.builders import BLOCK_SIZE, make_view
from tests.conductor.scripted_node import MODEL_ID, node_info
from tests.manual_clock import ManualClock
from tests.simulation.loop import SimLoop

START = partial(Start, first_token_id=1, checksums=())


class Link:
    """Keeps what is written."""

    peer_uris = ()

    def __init__(self, end):
        self.end, self.is_choked, self.messages = end, False, []
        end.opened(self)

    def send(self, message):
        self.messages.append(to_node_from(pb.ConductorMessage.FromString(message)))

    def close(self, error=None):
        self.end.closed(error)


class Attached:
    """A node that is attached, and its session at the conductor."""

    def __init__(self):
        clock = ManualClock()
        membership = Membership(MODEL_ID, make_view(0, 0), clock)
        self.link = Link(AttachService(membership, Registered(10.0, 2.0, 1), clock).stream())
        info = node_info(block_size=BLOCK_SIZE)
        for message in (register(info), pb.NodeMessage()):
            self.link.end.received(message.SerializeToString())
        self.session = membership.sessions[0]
        self.link.messages.clear()

    def say(self, *names, what=START):
        for name in names:
            self.session.send(what(RequestId(name)))

    def told(self):
        return [[item.request_id for item in message] for message in self.link.messages]


async def test_what_is_said_in_one_turn_goes_in_one_message_at_its_end():
    node = Attached()
    node.say("a", "b")
    assert node.told() == []
    await asyncio.sleep(0)
    assert node.told() == [["a", "b"]]
    node.say("c")
    await asyncio.sleep(0)
    assert node.told() == [["a", "b"], ["c"]]
    node.link.close()


async def test_what_cannot_be_packed_fails_its_own_request_alone():
    node, heard = Attached(), Mailbox()
    node.session.begin(RequestId("bad"), heard)
    sampling, stop = SamplingParams(seed=1.5), StopParams(1)
    work = Work(RequestId("bad"), (1,), 1, BlockHash(bytes(16)), sampling, stop, None, 0, 60.0)
    node.session.send(Reserve(work))
    node.say("a")
    await asyncio.sleep(0)
    assert node.told() == [["a"]]
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        await heard.next(Prefilled)
    node.link.close()


async def test_what_is_much_goes_before_the_end_of_the_turn():
    node, many = Attached(), [str(number) for number in range(MOST_TOGETHER + 1)]
    node.say(*many)
    assert node.told() == [many[:-1]]
    await asyncio.sleep(0)
    assert node.told() == [many[:-1], many[-1:]]
    node.link.close()


def test_a_release_waits_for_company_and_not_for_long():
    loop = SimLoop(lambda: (0.0, True))

    async def run():
        node = Attached()
        node.say("a", what=Release)
        await asyncio.sleep(0)
        assert node.told() == []
        node.say("b")
        await asyncio.sleep(0)
        assert node.told() == [["b", "a"]]  # releases are the last of a message
        node.say("c", what=Release)
        for wait_s, told in ((RELEASE_S * 0.9, []), (RELEASE_S * 0.2, [["c"]])):
            over = loop.create_future()
            loop.call_later(wait_s, over.set_result, None)
            await over
            assert node.told()[1:] == told
        node.link.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


async def test_who_does_not_read_is_told_all_of_it_later():
    node = Attached()
    node.link.is_choked = True
    for name in "ab":
        node.say(name)
        await asyncio.sleep(0)
    assert node.told() == []
    node.link.is_choked = False
    node.link.end.writable()
    assert node.told() == [["a", "b"]]
    node.link.close()


async def test_nothing_said_is_nothing_sent():
    node = Attached()
    await asyncio.sleep(0)
    assert node.told() == []
    node.link.close()
