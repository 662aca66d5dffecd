"""KV events that were lost on a live stream: the conductor asks for all blocks, and knows them again."""

import itertools

from base.block_hash import HASH_BYTES
from base.messages import Heartbeat, KvEvents, TellBlocks
from conductor.serving.membership import MAX_SNAPSHOT_PAUSE_S, Membership
from conductor.serving.nodes import NodeSession
from tests.conductor.builders import BLOCK_SIZE, make_view
from tests.conductor.dispatching import conductor, until
from tests.conductor.scripted_node import MODEL_ID, ScriptedWork, node_info
from tests.manual_clock import ManualClock


class Attached:
    """A member, and what it was asked."""

    def __init__(self):
        self.clock, self.view = ManualClock(), make_view(0, 0)
        self.membership = Membership(MODEL_ID, self.view, self.clock)
        self.session = NodeSession(node_info(block_size=BLOCK_SIZE))
        self.membership.join(self.session)

    def tells(self, first_number, *stored, is_snapshot=False):
        self.membership.kv_events(self.session, KvEvents(first_number, is_snapshot, stored, ()))

    def beats(self, next_kv_event=0):
        beat = Heartbeat(1, 100, 0, 0, 0, 0, 0, next_kv_event=next_kv_event)
        self.membership.heartbeat(self.session, beat, self.clock.now_s())

    def num_asked(self):
        return sum(isinstance(item, TellBlocks) for item in self.session.take_outgoing())

    @property
    def num_known(self):
        return self.view.index.num_blocks(self.view.node("n0").slot)


def test_a_gap_between_two_messages_brings_one_request_for_a_snapshot_and_that_mends_it():
    node = Attached()
    node.tells(1, b"a", b"b")
    node.tells(4, b"d")
    assert (node.num_asked(), node.num_known) == (1, 0)
    node.tells(5, b"e")
    assert node.num_asked() == 0
    node.tells(6, b"a", b"b", b"c", b"d", b"e", is_snapshot=True)
    node.tells(11, b"f")
    assert (node.num_asked(), node.num_known) == (0, 6)


def test_events_that_were_lost_last_are_missed_by_the_heartbeat():
    node = Attached()
    node.tells(1, b"a")
    node.beats(2)
    assert node.num_asked() == 0
    node.beats(3)
    assert (node.num_asked(), node.num_known) == (1, 0)


def test_a_heartbeat_that_does_not_say_the_number_is_no_gap():
    node = Attached()
    node.tells(1, b"a")
    node.beats()
    assert (node.num_asked(), node.num_known) == (0, 1)


def test_a_node_that_never_counts_right_is_asked_less_and_less_often():
    node, asked_at_s = Attached(), []
    for second in range(400):
        node.tells(7 * second + 3, b"x")
        node.beats()
        if node.num_asked():
            asked_at_s.append(second)
        node.clock.advance(1.0)
    assert asked_at_s[:6] == [0, 2, 6, 14, 30, 62]
    pauses = {after - before for before, after in itertools.pairwise(asked_at_s[6:])}
    assert pauses == {MAX_SNAPSHOT_PAUSE_S}


class Forgetful(ScriptedWork):
    """Loses what it was to tell once."""

    def __init__(self):
        super().__init__()
        self.lost_events = KvEvents(5, False, (b"e" * HASH_BYTES,), ())
        self.snapshot = (b"a" * HASH_BYTES, b"b" * HASH_BYTES)

    def kv_events(self):
        events, self.lost_events = self.lost_events, None
        return events

    def kv_snapshot(self):
        if self.lost_events is not None:
            return KvEvents(1, True, (), ())
        return KvEvents(6, True, self.snapshot, ())


async def test_a_gap_on_a_real_stream_is_mended_by_the_node():
    async with conductor() as running:
        await running.attach(Forgetful())
        (session,) = running.membership.sessions
        slot = running.view.node(session.info.node_id).slot
        await until(lambda: running.view.index.num_blocks(slot) == 2)
        assert not running.view.awaits_snapshot(session.info.node_id)
