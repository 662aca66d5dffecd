"""The price of a copy: what evicted blocks cost those who come back for them."""

import pytest

from base.request import NodeId
from conductor.placing.copy_price import FEWEST_EVICTED, CopyPrice
from conductor.placing.scheduler import place
from kvstore.index import PrefixIndex
from tests.conductor.builders import BLOCK_SIZE, make_cost, make_request, make_view, require_placement

COST = make_cost()


def test_a_block_costs_nothing_while_nobody_misses_what_was_evicted() -> None:
    price = CopyPrice(PrefixIndex())
    price.evicted(range(100))
    assert price.num_missed(range(200, 210), 0) == 0
    assert price.block_s == 0.0


def test_a_block_costs_what_was_computed_again_for_each_that_was_evicted() -> None:
    index = PrefixIndex()
    index.store(0, range(1_000, 3_000))
    price = CopyPrice(index)
    price.evicted(range(100))
    assert price.num_missed(range(110), 0) == 100
    assert price.num_missed(range(110), 95) == 5
    price.recomputed(range(110), 0, 100, seconds=3.0)
    assert price.block_s == pytest.approx(3.0 / (FEWEST_EVICTED + 100))
    assert price.num_missed(range(110), 0) == 0, "what was computed again is missed once"


def test_a_block_that_another_node_holds_is_not_missed() -> None:
    index = PrefixIndex()
    index.store(0, range(10))
    price = CopyPrice(index)
    price.evicted(range(10))
    assert price.num_missed(range(10), 0) == 0


def test_what_went_long_ago_is_forgotten_and_memory_is_bounded() -> None:
    index = PrefixIndex()
    index.store(0, range(1_000_000, 1_000_500))
    price = CopyPrice(index)
    for first in range(0, 20_000, 50):
        price.evicted(range(first, first + 50))
    assert price.num_missed(range(50), 0) == 0
    assert price.num_missed(range(19_950, 20_000), 0) == 50
    remembered = sum(price.num_missed([key], 0) for key in range(20_000))
    assert remembered <= 2 * len(index) + 100


def view_with_a_busy_holder():
    """A view of which p0 holds ten blocks and has half a second queued; p1 is idle, and both are full."""
    view = make_view(2, 1)
    request = make_request(blocks=10, request_id="again")
    view.kv_events(NodeId("p0"), 1, list(request.chain), [])
    first = make_request(blocks=3, request_id="first")
    held = require_placement(place(first, view, COST, 0.0))
    assert held.prefill_node == "p1", "the smaller cache is empty"
    return view, request


def test_a_copy_is_not_made_where_it_costs_more_than_the_wait() -> None:
    view = make_view(2, 1)
    request = make_request(blocks=20)
    view.kv_events(NodeId("p0"), 1, list(request.chain), [])
    wait_s = COST.prefill_s(request.num_tokens, 0) / 2
    view.prefill_order.set(0, wait_s)
    assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p1"
    view.copy_price.restore(wait_s / 10)
    assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p1", "p1 has room"
    view.node(NodeId("p1")).evict_share = 1.0
    assert require_placement(place(request, view, COST, 0.0)).prefill_node == "p0"


def test_the_price_comes_from_kv_events_and_placements() -> None:
    view = make_view(1, 1)
    node, old, new = NodeId("p0"), make_request(blocks=30), list(range(5_000, 5_030))
    chain = list(old.chain)
    view.kv_events(node, 1, chain, [])
    assert view.node(node).evict_share == 0.0
    view.kv_events(node, 31, new, chain)
    assert view.node(node).evict_share > 0.0
    assert view.copy_price.block_s == 0.0
    view.placed(old, require_placement(place(old, view, COST, 0.0)), 0.0)
    again_s = COST.prefill_s(old.num_tokens, 0) - COST.prefill_s(1, old.num_tokens - 1)
    assert view.copy_price.block_s == pytest.approx(again_s / (FEWEST_EVICTED + 30), rel=0.05)
    assert old.num_tokens == BLOCK_SIZE * 30
