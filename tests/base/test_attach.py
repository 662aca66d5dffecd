"""The node's end of the attach stream: whatever ends it, the node lets go and dials again."""

import asyncio
import random

import pytest

from base.attach import CONNECT_TIMEOUT_S, FOREIGN_BACKOFF_S, AttachClient, MessageObserver
from base.errors import ForeignPeerError, ProtocolError
from base.messages import Failed, Prefilled, PrefillTimes, Registered, Reserve, Tokens
from base.request import RequestId, SampledToken, TokenLogprobs
from base.turns import TURN_UNITS
from base.wire import lease_to, refused, to_node
from protos import nodes_pb2 as pb
from tests.conductor.scripted_node import ScriptedWork, node_info
from tests.node_parts import work
from tests.simulation.loop import SimLoop

LEASE = Registered(lease_s=10.0, heartbeat_s=2.0, conductor_epoch=1)


class Link:
    """A conductor that answers a registration with `answer`, and keeps what it is sent."""

    is_choked = False
    peer_uris = ()

    def __init__(self, end, answer):
        self.end, self.is_over = end, False
        self.sent = []
        end.opened(self)
        if answer is not None:
            self.say(answer)

    def send(self, message):
        self.sent.append((asyncio.get_running_loop().time(), pb.NodeMessage.FromString(message)))

    def say(self, message):
        try:
            self.end.received(message if isinstance(message, bytes) else message.SerializeToString())
        except ProtocolError as error:
            self.close(error)

    def close(self, error=None):
        if not self.is_over:
            self.is_over = True
            self.end.closed(error)


def attached_for(seconds, begin=lambda link: None, first_answer=None, observers=()):
    """Run a node for so long; return its links, its work and what it logged as the client's task ended.

    `begin` is called with the first link, half a second after it was made.
    """
    loop, work, links = SimLoop(lambda: (0.0, True)), ScriptedWork(), []

    async def dial_end(end):
        links.append(Link(end, lease_to(LEASE) if links or first_answer is None else first_answer))

    async def run():
        client = AttachClient(node_info(), "there", random.Random(0), dial_end=dial_end, observers=observers)
        work.send = client.send
        task = asyncio.ensure_future(client.run(work))
        await asyncio.sleep(0.5)
        begin(links[0])
        await asyncio.sleep(seconds - 0.5)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert not loop.violations
    return links, work


@pytest.mark.parametrize(
    "begin",
    [
        lambda link: link.close(),
        lambda link: link.close(ConnectionResetError("cut")),
        lambda link: link.say(b"\xff" * 10),
        lambda link: link.say(pb.ConductorMessage(prefill=[pb.Prefill()])),
    ],
    ids=["closed", "cut", "noise", "wrong work"],
)
def test_the_end_of_the_stream_is_not_the_end_of_the_node(begin):
    links, work = attached_for(9.0, begin)
    assert [link.is_over for link in links] == [True, True]
    assert work.num_lost == 2  # by the failure, and by the end of the test


@pytest.mark.parametrize(
    ("answer", "told"), [(refused("no"), "refused: no"), (pb.ConductorMessage(heartbeat=True), "Registered")]
)
def test_a_node_that_is_not_taken_in_says_why_and_dials_again(answer, told, caplog):
    links, _ = attached_for(3.0, first_answer=answer)
    assert len(links) == 2
    assert told in caplog.text


def test_a_conductor_that_does_not_answer_is_dialled_again():
    links, _ = attached_for(CONNECT_TIMEOUT_S + 2.0, first_answer=b"")
    assert len(links) == 2


def test_an_address_of_something_else_is_dialled_again_after_half_a_minute_and_named(caplog):
    def begin(link):
        link.close(ForeignPeerError("the other side speaks HTTP/2"))

    links, _ = attached_for(FOREIGN_BACKOFF_S / 2, begin)
    assert len(links) == 1
    assert "speaks HTTP/2" in caplog.text
    assert "nodes.attach_port" in caplog.text
    links, _ = attached_for(FOREIGN_BACKOFF_S + 1.0, begin)
    assert len(links) == 2


def test_a_silent_conductor_is_left_after_the_lease():
    links, work = attached_for(9.9)
    assert len(links) == 1
    links, work = attached_for(10.5)
    assert links[0].is_over
    assert work.num_lost >= 1


def test_a_word_renews_the_lease():
    links, _ = attached_for(10.4, lambda link: link.say(pb.ConductorMessage(heartbeat=True)))
    assert not links[0].sent[0][1].HasField("heartbeat")
    assert len(links) == 1


def test_the_state_is_told_every_heartbeat_and_soon_after_a_result_that_went_without_it():
    def begin(link):
        client_end = link.end
        for name in ("a", "b"):
            client_end.send(Failed(RequestId(name), "LostError", "x"))
        loop = asyncio.get_running_loop()
        loop.call_later(0.001, client_end.send, Failed(RequestId("c"), "LostError", "x"))

    links, _ = attached_for(5.0, begin)
    told = [
        (round(at_s, 3), [item.request_id for item in message.failed], message.HasField("heartbeat"))
        for at_s, message in links[0].sent[1:]
    ]
    assert told == [
        (0.0, [], True),
        (0.5, ["a", "b"], True),
        (0.501, ["c"], False),
        (0.521, [], True),
        (2.521, [], True),
        (4.521, [], True),
    ]


def test_the_state_goes_with_each_first_token_however_short_ago_it_went():
    def begin(link):
        end, loop = link.end, asyncio.get_running_loop()
        end.send(Failed(RequestId("a"), "LostError", "x"))
        first = Prefilled(RequestId("b"), SampledToken(5), None, 0, (), PrefillTimes(0.0, 0.1, 0.0))
        loop.call_later(0.001, end.send, first)
        loop.call_later(0.002, end.send, Failed(RequestId("c"), "LostError", "x"))

    links, _ = attached_for(1.0, begin)
    sent = [
        (round(at_s, 3), len(message.prefilled), message.HasField("heartbeat"))
        for at_s, message in links[0].sent[1:]
    ]
    assert sent == [(0.0, 0, True), (0.5, 0, True), (0.501, 1, True), (0.502, 0, False), (0.522, 0, True)]


def test_tokens_that_pile_up_leave_in_messages_of_a_turn_each_in_order_and_none_is_lost():
    likely = SampledToken(5, TokenLogprobs(-0.5, tuple((place, -1.0) for place in range(20))))
    names = [str(number) for number in range(TURN_UNITS // 5)]

    def begin(link):
        for name in names:
            link.end.send(Tokens(RequestId(name), (likely,), None))

    links, _ = attached_for(3.0, begin)
    messages = [message for _, message in links[0].sent if message.tokens]
    units = [
        sum(1 + len(token.top) for item in message.tokens for token in item.tokens) for message in messages
    ]
    assert [item.request_id for message in messages for item in message.tokens] == names
    assert TURN_UNITS <= units[0] < TURN_UNITS + 21
    assert max(units) == units[0]
    assert len(messages) == -(-21 * len(names) // units[0])


def test_a_node_that_is_asked_for_its_blocks_tells_them_all_once():
    def begin(link):
        link.say(pb.ConductorMessage(wants_snapshot=True))
        link.say(pb.ConductorMessage(wants_snapshot=True))

    links, _ = attached_for(3.0, begin)
    told = [(round(at_s, 3), message.kv_events.is_snapshot) for at_s, message in links[0].sent[1:]]
    assert told == [(0.0, True), (0.502, True), (2.502, False)]


class Heard(MessageObserver):
    def __init__(self):
        self.facts = []

    def received(self, items):
        self.facts += [type(item).__name__ for item in items]

    def sent(self, item):
        self.facts.append(type(item).__name__)

    def lost(self):
        self.facts.append("lost")


def test_observers_are_notified_of_messages_both_ways_in_order_and_of_each_end():
    def begin(link):
        link.say(to_node([Reserve(work())]))
        link.close()

    heard = Heard()
    attached_for(3.0, begin, observers=[heard])
    assert heard.facts == ["Reserve", "Reserved", "lost", "lost"]
