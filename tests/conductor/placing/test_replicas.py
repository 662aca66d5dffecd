"""Hot prefixes are copied where their heat and skew justify it, and the copies go when they are cold."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from base.request import NodeId, Role
from conductor.placing.replicas import (
    COLD_S,
    COPY_TIMEOUT_S,
    LASTING_S,
    MAX_COPIES,
    Copy,
    Drop,
    Hot,
    Replicas,
    replicas_wanted,
)
from tests.conductor.builders import BLOCK_SIZE, make_cost, make_info, make_view

COST = make_cost()
HOT = st.builds(Hot, st.integers(BLOCK_SIZE, 100_000), st.floats(0, 1_000), st.floats(0, 60))
CHAIN = tuple(f"b{number}" for number in range(16))


def heated(view, reads, read_s=1.0, now_s=0.0):
    replicas = Replicas(COST)
    for number in range(reads):
        # each goes on differently after what it shares
        replicas.read((*CHAIN, f"own{number}"), len(CHAIN), read_s, now_s)
    return replicas


def holding(num_prefill, holders):
    view = make_view(num_prefill, 1)
    for name in holders:
        view.kv_events(NodeId(name), 1, CHAIN, [])
    return view


@given(HOT, st.integers(0, 16), st.integers(1, 16))
def test_more_heat_or_longer_reads_never_want_fewer_and_no_node_is_wanted_twice(hot, holders, nodes):
    holders = min(holders, nodes)
    wanted = replicas_wanted(hot, holders, nodes, COST)
    assert 0 <= wanted <= nodes
    hotter = hot._replace(reads_per_s=hot.reads_per_s * 2, read_s=hot.read_s * 2)
    assert replicas_wanted(hotter, holders, nodes, COST) >= wanted


@given(HOT, st.integers(1, 16))
def test_what_one_holder_can_give_is_on_one_node(hot, nodes):
    calm = hot._replace(reads_per_s=0.4 / max(hot.read_s, 1e-6))
    assert replicas_wanted(calm, 1, nodes, COST) <= 1


def test_bytes_are_not_moved_for_what_is_read_seldom_however_long_a_read_takes():
    assert replicas_wanted(Hot(8_192, 1 / LASTING_S, 600.0), 1, 8, COST) == 1
    assert replicas_wanted(Hot(8_192, 1.0, 600.0), 1, 8, COST) == 8


def test_a_hot_prefix_is_copied_from_its_holder_to_the_idlest_nodes():
    view = holding(4, ["p1"])
    view.prefill_order.set(0, 50.0)
    replicas = heated(view, reads=200)
    (copy,) = replicas.step(view, 0.0)
    assert (copy.source_slot, copy.first_block) == (1, 0)
    assert copy.target_slot in (2, 3)
    assert tuple(copy.chain) == CHAIN
    # the copy came: now two can lend
    view.kv_events(view.node_at(copy.target_slot).info.node_id, 1, CHAIN, [])
    more = replicas.step(view, 0.0)
    assert {item.target_slot for item in more} == {0, 2, 3} - {copy.target_slot}


def test_a_copy_on_its_way_is_not_begun_again_before_it_is_given_up():
    view = holding(2, ["p1"])
    replicas = heated(view, reads=10_000)
    assert replicas.step(view, 0.0)
    assert not replicas.step(view, COPY_TIMEOUT_S - 1)
    assert replicas.step(view, COPY_TIMEOUT_S)


def test_only_what_a_node_lacks_is_copied():
    view = holding(2, ["p1"])
    view.kv_events(NodeId("p0"), 1, CHAIN[:10], [])
    (copy,) = heated(view, reads=200).step(view, 0.0)
    assert (copy.target_slot, copy.first_block) == (0, 10)


def test_a_cold_copy_is_dropped_and_what_came_by_itself_is_not():
    view = holding(4, ["p1", "p2"])
    replicas = heated(view, reads=200)
    copies = replicas.step(view, 0.0)
    assert {item.target_slot for item in copies} == {0, 3}
    for copy in copies:
        view.kv_events(view.node_at(copy.target_slot).info.node_id, 1, CHAIN, [])
    assert not replicas.step(view, COLD_S - 1)
    dropped = replicas.step(view, COLD_S + 1)
    assert {item.slot for item in dropped} == {0, 3}
    assert all(isinstance(item, Drop) and tuple(item.blocks) == CHAIN for item in dropped)
    assert not replicas.step(view, COLD_S + 1), "dropped once"


def test_copies_at_one_step_are_bounded_and_a_draining_node_gets_none():
    view = holding(12, ["p0", "p1", "p2", "p3", "p4", "p5"])
    view.set_draining(NodeId("p7"), 0.0)
    copies = heated(view, reads=1_000).step(view, 0.0)
    assert len([item for item in copies if isinstance(item, Copy)]) <= MAX_COPIES
    assert 7 not in {item.target_slot for item in copies}


def test_what_nobody_holds_any_more_is_not_copied():
    view = holding(3, ["p1"])
    replicas = heated(view, reads=200)
    view.remove_node(NodeId("p1"))
    assert not replicas.step(view, 0.0)
    view.add_node(make_info("p9", Role.PREFILL), 0.0)
    assert not replicas.step(view, inf)
