"""The conductor's account of its cluster: what is taken is given back."""

import random
from dataclasses import replace
from math import inf

import pytest

from base.errors import StaleError
from base.kv_layout import head_layout
from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.decode_projection import FEWEST_LENGTHS
from conductor.placing.placement import Rejection
from conductor.placing.scheduler import place
from tests.conductor.builders import (
    BLOCK_SIZE,
    make_cost,
    make_heartbeat,
    make_info,
    make_request,
    make_view,
    require_placement,
)

COST = make_cost()


@pytest.mark.parametrize("seed", range(10))
def test_account_is_empty_when_every_request_ended(seed: int) -> None:
    rng = random.Random(seed)
    view, now_s, waiting, decoding = make_view(3, 3), 0.0, [], []
    for number in range(120):
        now_s += rng.random()
        request = make_request(f"r{number}", blocks=rng.randrange(1, 30), first_block=rng.randrange(3))
        placement = require_placement(place(request, view, COST, now_s))
        view.placed(request, placement, now_s)
        waiting.append(request.request_id)
        if rng.random() < 0.8:
            done = waiting.pop(rng.randrange(len(waiting)))
            view.prefill_done(done, now_s)
            decoding.append(done)
        if decoding and rng.random() < 0.7:
            view.finished(decoding.pop(rng.randrange(len(decoding))), now_s, 100)
    for request_id in waiting + decoding:
        view.finished(request_id, now_s)
    assert view.num_in_flight == 0
    assert view.running_sequences == 0
    assert view.projection.at(now_s, now_s) == (0, 0)
    for node_id in view.node_ids():
        node = view.node(node_id)
        assert (node.num_queued, node.queued_s, node.queued_tokens) == (0, 0.0, 0)
        assert (node.decode_sequences, node.running_sequences, node.num_outgoing) == (0, 0, 0)
        assert node.decode_context_tokens == pytest.approx(0.0, abs=1e-6)
        assert node_id.startswith("d") or view.prefill_order.values[node.slot] <= now_s
    view.prefill_order.check()
    view.decode_order.check()


def test_node_that_left_with_requests_leaves_no_trace_in_its_slot() -> None:
    view = make_view(1, 1)
    request = make_request()
    view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    view.remove_node(NodeId("d0"))
    node = view.add_node(make_info("d9", Role.DECODE), 1.0)
    view.prefill_done(request.request_id, 1.0)
    view.finished(request.request_id, 2.0, 5)
    assert node.slot == 1
    assert (node.decode_sequences, node.peak_tokens) == (0, 0.0)


def test_restarted_node_begins_with_nothing() -> None:
    view = make_view(1, 1)
    view.kv_events(NodeId("p0"), 1, ["a"], [])
    view.add_node(make_info("p0", Role.PREFILL), 1.0)
    assert view.index.match(["a"]) == []
    assert view.kv_events(NodeId("p0"), 1, ["b"], [])


@pytest.mark.parametrize("fields", [{"block_size": 16}, {"layout_id": "other"}])
def test_incompatible_node_is_refused_with_the_reason(fields: dict[str, object]) -> None:
    view = make_view(1, 1)
    with pytest.raises(StaleError, match="block_size"):
        view.add_node(make_info("p9", Role.PREFILL, **fields), 0.0)
    assert view.node_ids() == ["p0", "d0"]


def test_a_node_whose_kv_has_another_layout_is_told_the_fields_that_differ() -> None:
    view = make_view(0, 0)
    wide = head_layout(2, 4, 64, 64, "bfloat16").layout_id
    view.add_node(make_info("p0", Role.PREFILL, layout_id=f"{wide}/checksum=xxh3"), 0.0)
    narrow = head_layout(2, 4, 64, 64, "float16").layout_id
    with pytest.raises(StaleError, match="key 4x64:float16 and 4x64:bfloat16, value"):
        view.add_node(make_info("d0", Role.DECODE, layout_id=f"{narrow}/checksum=xxh3"), 0.0)


def test_a_node_without_roles_is_a_source_of_blocks_and_nothing_else() -> None:
    view = make_view(1, 1)
    store = replace(make_info("s0", Role.PREFILL), roles=frozenset(), model_id="", layout_id="", block_size=0)
    view.add_node(store, 0.0)
    view.kv_events(NodeId("s0"), 1, ["a"], [])
    assert view.index.match(["a"]) == [(1, 1 << view.node(NodeId("s0")).slot)]
    assert not (view.prefill_mask | view.decode_mask) & 1 << view.node(NodeId("s0")).slot
    view.add_node(make_info("p1", Role.PREFILL), 0.0)


def test_load_of_another_conductor_is_seen_in_the_heartbeat() -> None:
    view = make_view(2, 1)
    view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=2_700, num_queued_tokens=50_000), 0.0)
    assert require_placement(place(make_request(), view, COST, 0.0)).prefill_node == "p1"


def test_own_load_in_the_heartbeat_is_not_counted_twice() -> None:
    view = make_view(1, 1)
    request = make_request(blocks=20)
    view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    queue_ends_s = view.prefill_order.values[0]
    view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=2_700, num_queued_tokens=20 * 512), 0.0)
    assert view.prefill_order.values[0] == pytest.approx(queue_ends_s)


def test_own_prompts_that_wait_for_their_match_are_nobody_elses() -> None:
    view = make_view(1, 1)
    view.kv_events(NodeId("p0"), 1, list(range(20)), [])
    request = make_request(blocks=20)
    placement = require_placement(place(request, view, COST, 0.0))
    assert placement.matched_tokens > 19 * 512, "nearly all of it is cached"
    view.placed(request, placement, 0.0)
    queue_ends_s = view.prefill_order.values[0]
    view.heartbeat(NodeId("p0"), make_heartbeat(num_waiting=1, num_queued_tokens=20 * 512), 0.0)
    assert view.prefill_order.values[0] == pytest.approx(queue_ends_s)


def test_decode_nodes_are_ordered_by_what_was_learned_last() -> None:
    view = make_view(1, 2)
    for name in ("a", "b"):
        request = make_request(name)
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    fast, slow = (view.node(NodeId(name)) for name in ("d0", "d1"))
    assert view.decode_order.values[fast.slot] == view.decode_order.values[slow.slot]
    view.corrections.observe("d1", "decode", 0.1, 0.2)
    view.settle(0.0)
    assert view.decode_order.values[slow.slot] == pytest.approx(2 * view.decode_order.values[fast.slot])


@pytest.mark.parametrize("seed", range(10))
def test_a_view_that_heard_of_anothers_load_places_nearly_as_well_as_that_one_does(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = make_view(4, 4), make_view(4, 4)
    for number in range(24):
        # prompts share nothing: a queue is then told in tokens as well as in seconds
        request = make_request(f"r{number}", rng.randrange(1, 20), 100 * number, max_tokens=2)
        ours.placed(request, require_placement(place(request, ours, COST, 0.0)), 0.0)
        if number % 2:
            ours.prefill_done(request.request_id, 0.0)
    for node in ours.nodes():
        beat = make_heartbeat(
            num_waiting=node.num_queued,
            num_queued_tokens=node.queued_tokens,
            num_step_rows=node.running_sequences,
            num_context_tokens=int(node.running_context_tokens),
        )
        theirs.heartbeat(node.info.node_id, beat, 0.0)
    assert theirs.projected(0.0, 0.0)[0] == ours.running_sequences
    request = make_request("q", first_block=9_000)
    own, other = (require_placement(place(request, view, COST, 0.0)) for view in (ours, theirs))
    waits_s = {
        name: ours.prefill_order.values[ours.node(NodeId(name)).slot] for name in ("p0", "p1", "p2", "p3")
    }
    assert waits_s[other.prefill_node] <= waits_s[own.prefill_node] * 1.25
    steps_s = {
        name: ours.decode_order.values[ours.node(NodeId(name)).slot] for name in ("d0", "d1", "d2", "d3")
    }
    assert steps_s[other.decode_node] <= steps_s[own.decode_node] * 1.25


def test_load_of_another_conductor_goes_when_its_heartbeat_says_so_and_with_the_node() -> None:
    view = make_view(1, 2)
    busy = make_heartbeat(num_step_rows=5, num_context_tokens=9_000)
    view.heartbeat(NodeId("d0"), busy, 0.0)
    view.heartbeat(NodeId("d1"), busy, 0.0)
    assert view.projected(0.0, 0.0) == (10, 18_000)
    view.heartbeat(NodeId("d0"), make_heartbeat(), 1.0)
    assert require_placement(place(make_request(), view, COST, 1.0)).decode_node == "d0"
    view.remove_node(NodeId("d1"))
    assert view.projected(1.0, 1.0) == (0, 0)
    assert (view.running_sequences, view.running_context_tokens) == (0, 0.0)


def test_a_node_that_refused_a_reservation_is_full_until_a_later_heartbeat() -> None:
    view = make_view(1, 2)
    request = make_request()
    placement = require_placement(place(request, view, COST, 0.0))
    view.placed(request, placement, 0.0)
    view.refused(placement.decode_node, 0.0)
    view.finished(request.request_id, 0.0)
    view.heartbeat(placement.decode_node, make_heartbeat(), 0.0)
    assert require_placement(place(request, view, COST, 0.0)).decode_node != placement.decode_node
    view.heartbeat(placement.decode_node, make_heartbeat(), 1.0)
    assert require_placement(place(request, view, COST, 1.0)).decode_node == placement.decode_node


def test_sequences_that_hold_blocks_of_one_another_leave_as_much_room_for_more() -> None:
    view = make_view(1, 0)
    view.add_node(make_info("d0", Role.DECODE, num_blocks=100), 0.0)
    asked = [make_request(f"r{number}", blocks=30, max_tokens=1) for number in range(5)]
    for request in asked[:3]:
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=10), 0.0)
    assert isinstance(place(asked[3], view, COST, 0.0), Rejection)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=50, num_shared_blocks=40), 0.0)
    view.placed(asked[3], require_placement(place(asked[3], view, COST, 0.0)), 0.0)
    assert isinstance(place(asked[4], view, COST, 0.0), Rejection), "50 were free, and 30 of them are taken"
    for request in asked[:4]:
        view.finished(request.request_id, 0.0)
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=100), 0.0)
    assert view.node(NodeId("d0")).free_tokens() == 100 * view.block_size


@pytest.mark.parametrize(("num_shared_blocks", "most"), [(40, 50), (1 << 31, 100)])
def test_what_a_sequence_shared_is_not_free_when_it_ends_until_the_node_says_so(
    num_shared_blocks: int, most: int
) -> None:
    view = make_view(1, 0)
    view.add_node(make_info("d0", Role.DECODE, num_blocks=100), 0.0)
    for name in ("first", "second"):
        request = replace(make_request(name, blocks=50, max_tokens=1), num_tokens=50 * BLOCK_SIZE - 1)
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    node = view.node(NodeId("d0"))
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=40, num_shared_blocks=num_shared_blocks), 0.0)
    view.finished(RequestId("first"), 0.0)
    assert node.free_tokens() <= most * BLOCK_SIZE
    view.finished(RequestId("second"), 0.0)
    assert node.free_tokens() <= node.capacity_tokens
    larger = make_request("larger", blocks=100)
    assert isinstance(place(larger, view, COST, 0.0), Rejection)


def test_an_empty_node_takes_who_may_outgrow_it_whatever_came_before() -> None:
    for seed in range(10):
        rng, running = random.Random(seed), []
        view = make_view(1, 0)
        view.add_node(make_info("d0", Role.DECODE, num_blocks=1_000), 0.0)
        for number in range(100):
            request = make_request(f"r{number}", blocks=rng.randrange(1, 40), max_tokens=4_000)
            view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
            running.append(request.request_id)
            if len(running) > 25:
                view.finished(running.pop(rng.randrange(len(running))), 0.0, rng.randrange(2, 1_000))
        for request_id in running:
            view.finished(request_id, 0.0)
        view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=1_000), 0.0)
        large = make_request("large", blocks=999, max_tokens=4_000)
        large = replace(large, num_tokens=1_000 * BLOCK_SIZE - 1)
        assert not isinstance(place(large, view, COST, 0.0), Rejection)


def test_roles_are_those_that_the_node_tells() -> None:
    view = make_view(1, 2)
    view.heartbeat(NodeId("d0"), make_heartbeat(roles=frozenset({Role.PREFILL})), 0.0)
    assert (view.prefill_mask.bit_count(), view.decode_mask.bit_count()) == (2, 1)
    view.heartbeat(NodeId("d0"), make_heartbeat(), 1.0)
    assert view.prefill_mask.bit_count() == 2, "a heartbeat without roles changes none"


def test_heartbeat_does_not_begin_the_prefill_under_way_again() -> None:
    view = make_view(1, 1)
    request = make_request(blocks=20)
    view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    ends_s = view.prefill_order.values[0]
    for now_s in (0.3, 0.6):
        view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=2_700, num_queued_tokens=5_000), now_s)
        assert view.prefill_order.values[0] == pytest.approx(ends_s)
    view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=2_700), 50.0)
    assert view.prefill_order.values[0] == 50.0


def test_node_that_says_it_drains_gets_no_work_until_it_says_otherwise() -> None:
    view = make_view(2, 1)
    view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=1, is_draining=True), 1.0)
    assert require_placement(place(make_request(), view, COST, 1.0)).prefill_node == "p1"
    view.heartbeat(NodeId("p0"), make_heartbeat(num_free_blocks=1), 2.0)
    assert require_placement(place(make_request(), view, COST, 2.0)).prefill_node == "p0"


def test_prompts_that_were_to_be_done_and_are_not_hold_their_node_up() -> None:
    view = make_view(2, 1)
    for number in range(4):
        request = make_request(f"r{number}", blocks=20, first_block=100 * number)
        placement = require_placement(place(request, view, COST, 0.0))
        view.placed(request, replace(placement, prefill_node=NodeId("p0")), 0.0)
    each_s, ends_s = view.node(NodeId("p0")).queued_s / 4, view.prefill_order.values[0]
    assert each_s > 0.5
    view.settle(ends_s - 0.01)
    assert view.prefill_order.values[0] == ends_s
    view.settle(ends_s + 0.01)
    assert view.prefill_order.values[0] == pytest.approx(ends_s + 0.01 + 3.25 * each_s)
    asked = make_request("q", first_block=900)
    assert require_placement(place(asked, view, COST, ends_s + 0.02)).prefill_node == "p1"
    for number in range(4):
        view.finished(RequestId(f"r{number}"), ends_s + 1.0)
    view.settle(ends_s + 2.0)
    assert require_placement(place(asked, view, COST, ends_s + 2.0)).prefill_node == "p0"


def test_another_conductors_prompts_are_behind_own_ones_that_are_overdue() -> None:
    view = make_view(1, 1)
    for number in range(2):
        request = make_request(f"r{number}", blocks=20, first_block=100 * number)
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    beat = make_heartbeat(num_waiting=3, num_queued_tokens=60 * 512)
    view.heartbeat(NodeId("p0"), beat, 0.0)
    node, ends_s = view.node(NodeId("p0")), view.prefill_order.values[0]
    assert node.foreign_queue_s > 1.0
    late_s, overdue_s = ends_s + 0.01, 1.25 * node.queued_s / 2
    view.settle(late_s)
    assert view.prefill_order.values[0] == pytest.approx(late_s + overdue_s + node.foreign_queue_s)
    view.heartbeat(NodeId("p0"), beat, late_s)
    assert view.prefill_order.values[0] == pytest.approx(late_s + overdue_s + node.foreign_queue_s)


def test_a_prompt_that_is_late_by_what_a_message_takes_holds_nobody_up() -> None:
    view = make_view(1, 1)
    request = make_request(blocks=1)
    view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    ends_s = view.prefill_order.values[0]
    view.settle(ends_s + 0.001)
    assert view.prefill_order.values[0] == ends_s


def test_prompts_on_their_way_to_a_node_hide_no_sequences_of_another_conductor() -> None:
    view = make_view(1, 1)
    for number in range(3):
        request = make_request(f"r{number}", first_block=100 * number)
        placement = require_placement(place(request, view, COST, 0.0))
        assert (placement.prefill_node, placement.decode_node) == ("p0", "d0")
        view.placed(request, placement, 0.0)
    # nothing of ours has reached the prefill node yet, or all is being handed over
    view.heartbeat(NodeId("p0"), make_heartbeat(num_running=3, num_step_rows=3, num_context_tokens=900), 0.0)
    assert view.node(NodeId("p0")).foreign_sequences == 3


def test_a_first_token_of_which_nothing_was_heard_is_no_sequence_of_another_conductor() -> None:
    view = make_view(1, 1)
    request = make_request()
    placement = require_placement(place(request, view, COST, 0.0))
    view.placed(request, replace(placement, decode_node=NodeId("p0")), 0.0)
    view.heartbeat(NodeId("p0"), make_heartbeat(num_running=3, num_step_rows=3, num_context_tokens=900), 0.0)
    assert view.node(NodeId("p0")).foreign_sequences == 2


def test_a_token_takes_what_is_predicted_of_all_who_were_placed_until_a_request_ends() -> None:
    view = make_view(1, 2)
    view.settle(0.0)
    assert view.projection.token_s == COST.empty_step_s
    for number in range(4):
        request = make_request(f"r{number}")
        view.placed(request, require_placement(place(request, view, COST, 0.0)), 0.0)
    view.settle(0.0)
    tokens = view.projection.num_tokens
    expected_s = COST.decode_step_s(4 / 2, tokens / 2)
    assert view.projection.token_s == pytest.approx(expected_s)
    assert expected_s > COST.empty_step_s
    view.prefill_done(RequestId("r0"), 1.0)
    view.finished(RequestId("r0"), 3.0, 101)
    view.settle(3.0)
    assert view.projection.token_s == pytest.approx(
        (15 / 16 * 256 * expected_s + 2.0) / (15 / 16 * 256 + 100)
    )


def test_answers_of_one_token_leave_a_price_that_can_be_settled() -> None:
    view = make_view(1, 1)
    refused = place(make_request("t", slo=Slo(tbt_slo_s=1e-3)), view, COST, 0.0)
    view.rejected(refused.reason, refused.has_room)
    assert view.room_price.price > 1.0
    for number in range(FEWEST_LENGTHS):
        request = make_request(f"r{number}", blocks=1, max_tokens=1)
        view.placed(request, require_placement(place(request, view, COST, float(number))), float(number))
        view.prefill_done(request.request_id, number + 0.5)
        view.finished(request.request_id, number + 0.5001, 1)
    assert view.projection.decode_s == 0.0
    require_placement(place(make_request("next", max_tokens=1), view, COST, 20.0))
    assert view.room_price.price == 1.0


def test_places_are_those_of_the_mean_decode_node_and_of_no_other():
    view = make_view(1, 0)
    assert view.decode_places == inf
    view.add_node(make_info("d0", Role.DECODE, max_batch=8), 0.0)
    view.add_node(make_info("d1", Role.DECODE, max_batch=256), 0.0)
    view.add_node(make_info("p9", Role.PREFILL, max_batch=4), 0.0)
    assert view.decode_places == 132
    view.heartbeat(NodeId("d1"), make_heartbeat(is_draining=True), 0.0)
    assert view.decode_places == 8
    view.set_roles(NodeId("p9"), frozenset({Role.DECODE}), 0.0)
    assert view.decode_places == 6
    view.remove_node(NodeId("d0"))
    assert view.decode_places == 4
    view.add_node(make_info("d2", Role.DECODE), 0.0)
    assert view.decode_places == inf
