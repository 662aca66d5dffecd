"""When a simulated conductor hears of blocks: as one hears of them that nodes are attached to."""

import pytest

from base.attach import STATE_GAP_S, WAKE_DELAY_S
from base.request import NodeId
from conductor.replay.block_news import BlockNews
from tests.conductor.builders import make_view

NODE = NodeId("p0")
LATER_S = 0.0001


class Heard:
    """A view that hears of one node, and the moments of what it stored."""

    def __init__(self, view_delay_s: float = 0.0) -> None:
        self.view = make_view(1, 1)
        self.news = BlockNews(self.view, view_delay_s)
        self.news.joined(NODE)
        self.number = 1

    def stored(self, block: int, now_s: float) -> None:
        self.news.stored(NODE, (self.number, [block], []), now_s)
        self.number += 1

    def blocks(self, now_s: float) -> int:
        self.news.settle(now_s)
        return self.view.index.num_blocks(self.view.node(NODE).slot)


def test_a_node_says_what_it_has_stored_a_moment_after() -> None:
    heard = Heard()
    heard.stored(7, 1.0)
    assert heard.blocks(1.0 + WAKE_DELAY_S - LATER_S) == 0
    assert heard.blocks(1.0 + WAKE_DELAY_S) == 1


def test_a_message_takes_along_what_is_stored_unless_one_did_just_before() -> None:
    heard = Heard()
    heard.stored(7, 1.0)
    heard.news.spoke(NODE, 1.0 + LATER_S)
    assert heard.blocks(1.0 + LATER_S) == 1
    heard.stored(8, 1.0 + 2 * LATER_S)
    heard.news.spoke(NODE, 1.0 + 3 * LATER_S)
    assert heard.blocks(1.0 + 3 * LATER_S) == 1
    heard.news.spoke(NODE, 1.0 + 4 * LATER_S, has_computed=True)
    assert heard.blocks(1.0 + 4 * LATER_S) == 2
    heard.stored(9, 1.0 + 4 * LATER_S)
    assert heard.blocks(1.0 + 4 * LATER_S) == 3, "what is said at one moment is one message"
    assert STATE_GAP_S > WAKE_DELAY_S > 4 * LATER_S


def test_what_is_stored_after_a_message_waits_its_own_time() -> None:
    heard = Heard()
    heard.stored(7, 1.0)
    heard.news.spoke(NODE, 1.0 + LATER_S, has_computed=True)
    heard.stored(8, 1.0 + 2 * LATER_S)
    assert heard.blocks(1.0 + WAKE_DELAY_S) == 1
    assert heard.blocks(1.0 + WAKE_DELAY_S + 3 * LATER_S) == 2


@pytest.mark.parametrize("view_delay_s", [0.0, 5.0])
def test_nothing_more_is_heard_of_a_node_that_has_died(view_delay_s: float) -> None:
    heard = Heard(view_delay_s)
    heard.stored(7, 1.0)
    heard.news.joined(NODE)
    assert heard.blocks(100.0) == 0


def test_every_view_is_late_by_its_delay_whatever_nodes_say() -> None:
    heard = Heard(5.0)
    heard.stored(7, 1.0)
    heard.news.spoke(NODE, 2.0, has_computed=True)
    assert heard.blocks(6.0 - LATER_S) == 0
    assert heard.blocks(6.0) == 1
