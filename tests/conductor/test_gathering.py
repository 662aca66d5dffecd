"""What is said to a node in one turn of the event loop leaves in one message, at the end of that turn."""

import asyncio

from base.clock import ManualClock
from base.messages import Lease, Release
from base.request import RequestId
from base.wire import to_node_from
from base.wire_membership import register
from conductor.attach import AttachService
from conductor.membership import Membership
from protos import nodes_pb2 as pb
from tests.conductor.builders import BLOCK_SIZE, make_view
from tests.conductor.scripted_node import MODEL_ID, node_info


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
        self.link = Link(AttachService(membership, Lease(10.0, 2.0, 1), clock).stream())
        info = node_info(block_size=BLOCK_SIZE)
        self.link.end.received(register(info).SerializeToString())
        self.session = membership.sessions[0]
        self.link.messages.clear()

    def say(self, *names):
        for name in names:
            self.session.send(Release(RequestId(name)))

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
