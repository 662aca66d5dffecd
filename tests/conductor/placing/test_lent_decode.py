"""When a prefill node decodes: for want of room or time in the decode pool, or to spare copies."""

from dataclasses import replace

import pytest

from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.lent_decode import PRESSED_STEPS, SPARES_FROM
from conductor.placing.placement import Rejection
from conductor.placing.prefill_policies import LATER
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
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
FAST = CostModel(load_profile("h200-llama8b"))
TOKENS = 10 * BLOCK_SIZE
ALONE_S = FAST.decode_step_s(1, TOKENS)
FOLLOW = SchedulerSettings(RejectPolicy.NONE, roles_follow=True)
FIXED = SchedulerSettings(RejectPolicy.NONE)


def placed(view, request, settings=FOLLOW, now_s=0.0):
    placement = require_placement(place(request, view, COST, now_s, settings))
    view.placed(request, placement, now_s)
    return placement


def without_inline(view):
    """Let decode nodes be so slow at prompts that they compute none."""
    for node in view.nodes():
        if node.info.node_id.startswith("d"):
            view.corrections.restore(node.info.node_id, "prefill", 1e6)
    return view


def full_decode(view):
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=0), 0.0)
    return view


def test_a_prefill_node_decodes_where_the_decode_pool_has_no_room():
    view = full_decode(make_view(1, 1))
    request = make_request()
    assert isinstance(place(request, view, COST, 0.0, FIXED), Rejection)
    placement = placed(view, request)
    assert (placement.prefill_node, placement.decode_node) == ("p0", "p0")
    assert placement.handoff_s == 0.0
    assert view.lent_mask == 1


def test_a_prefill_node_decodes_where_a_step_would_be_past_its_bound():
    view = without_inline(make_view(1, 1))
    bound = Slo(tbt_slo_s=1.02 * COST.decode_step_s(3, 3 * 10 * BLOCK_SIZE) / 0.95)
    where = []
    for number in range(6):
        request = make_request(f"r{number}", first_block=100 * number, slo=bound)
        where.append(placed(view, request, now_s=10.0 * number).decode_node)
        view.prefill_done(request.request_id, 10.0 * number + 5.0)
    assert where[0] == "d0"
    assert "p0" in where


def test_prefill_nodes_with_enough_to_do_lend_nothing():
    view = full_decode(make_view(1, 1))
    view.prefill_order.set(0, 60.0)
    assert isinstance(place(make_request(), view, COST, 0.0, FOLLOW), Rejection)


def test_what_decodes_on_a_prefill_node_slows_its_prompts_in_the_prediction():
    view = full_decode(make_view(1, 1))
    alone = COST.prefill_s(10 * view.block_size, 0)
    first = placed(view, make_request("a"))
    view.prefill_done(RequestId("a"), 1.0)
    second = require_placement(place(make_request("b", first_block=500), view, COST, 1.0, FOLLOW))
    assert first.prefill_s == pytest.approx(alone)
    assert second.prefill_s == pytest.approx(alone / second.prompt_share)
    assert 0 < second.prompt_share < 1
    view.finished(RequestId("a"), 2.0, 5)
    assert view.lent_mask == 0


def test_a_prompt_is_predicted_beside_those_who_will_have_begun_to_decode_before_it():
    view = full_decode(make_view(1, 1))
    placed(view, make_request("a"))
    assert (view.node(NodeId("p0")).running_sequences, view.lent_mask) == (0, 1)
    second = require_placement(place(make_request("b", first_block=500), view, COST, 0.0, FOLLOW))
    assert second.prompt_share < 1
    view.prefill_done(RequestId("a"), 1.0)
    third = require_placement(place(make_request("b", first_block=500), view, COST, 1.0, FOLLOW))
    assert third.prompt_share == pytest.approx(second.prompt_share, rel=0.01)


def test_few_prefill_nodes_lend_so_that_others_have_all_their_time():
    view = full_decode(make_view(3, 1))
    for number in range(4):
        placed(view, make_request(f"r{number}", first_block=100 * number, max_tokens=300))
        view.prefill_done(RequestId(f"r{number}"), 0.0)
    assert view.lent_mask.bit_count() == 1


def test_a_node_that_failed_the_request_lends_nothing_to_it():
    view = full_decode(make_view(1, 1))
    request = replace(make_request(), avoid=(NodeId("p0"),))
    assert isinstance(place(request, view, COST, 0.0, FOLLOW), Rejection)


def pressed_view():
    """Return a view whose decode node takes three times as long for a step as with one sequence."""
    view = without_inline(make_view(1, 1, FAST))
    while view.load_of(NodeId("d0"), 0.0)[1] < 3 * ALONE_S:
        number = view.node(NodeId("d0")).decode_sequences
        request = make_request(f"r{number}", first_block=100 * number)
        begun(view, request, FIXED)
    return view


def begun(view, request, settings=FOLLOW):
    """Return the node that decodes a request whose prompt took no time."""
    placement = require_placement(place(request, view, FAST, 0.0, settings))
    view.placed(request, placement, 0.0)
    view.prefill_done(request.request_id, 0.0)
    view.prefill_order.set(0, 0.0)
    view.prefill_demand.restore(0.0, 0.0)
    return placement.decode_node


def test_who_names_no_bound_is_spared_a_decode_node_that_others_make_slow():
    view = pressed_view()
    request = make_request("new", first_block=90_000)
    assert require_placement(place(request, view, FAST, 0.0, FIXED)).decode_node == "d0"
    assert require_placement(place(request, view, FAST, 0.0, FOLLOW)).decode_node == "p0"
    loose = replace(request, slo=Slo(tbt_slo_s=1e3))
    assert require_placement(place(loose, view, FAST, 0.0, FOLLOW)).decode_node == "d0", "it is in time there"


def test_prefill_nodes_that_have_prompts_for_half_of_their_time_spare_nobody_a_slow_step():
    view = pressed_view()
    request = make_request("new", first_block=90_000)
    view.prefill_demand.restore(0.9 * SPARES_FROM, 0.0)
    assert require_placement(place(request, view, FAST, 0.0, FOLLOW)).decode_node == "p0"
    view.prefill_demand.restore(1.1 * SPARES_FROM, 0.0)
    assert require_placement(place(request, view, FAST, 0.0, FOLLOW)).decode_node == "d0"


def test_a_prompt_that_is_sooner_computed_on_a_slow_decode_node_stays_there():
    view, request = pressed_view(), make_request("new", first_block=90_000)
    view.corrections.restore(NodeId("d0"), "prefill", 1.0)
    view.kv_events(NodeId("d0"), 1, list(request.chain), [])
    view.prefill_order.set(0, 0.9)
    placement = require_placement(place(request, view, FAST, 0.0, FOLLOW))
    assert placement.is_inline
    assert placement.predicted_ttft_s < 0.1


def test_a_prefill_node_takes_no_more_than_would_make_it_slow_too():
    view = pressed_view()
    where = [
        begun(view, make_request(f"n{number}", first_block=90_000 + 100 * number)) for number in range(70)
    ]
    taken = where.count("p0")
    assert where == ["p0"] * taken + ["d0"] * (70 - taken)
    slow_s = PRESSED_STEPS * ALONE_S
    assert (
        FAST.decode_step_s(taken, taken * TOKENS)
        <= slow_s
        < FAST.decode_step_s(taken + 3, (taken + 3) * TOKENS)
    )


def test_what_would_be_stored_twice_in_full_caches_stays_where_it_is_computed():
    view = without_inline(make_view(1, 1))
    request = make_request(blocks=20)
    assert require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node == "d0"
    view.copy_price.restore(0.1)
    view.node(NodeId("d0")).evict_share = 1.0
    assert require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node == "p0"
    assert require_placement(place(request, view, COST, 0.0, FIXED)).decode_node == "d0"


def test_what_is_stored_twice_is_handed_over_where_decoding_takes_more_of_a_busy_nodes_prompts():
    view = without_inline(make_view(1, 1))
    view.copy_price.restore(0.002)
    view.node(NodeId("d0")).evict_share = 1.0

    def decodes_on(bound_s):
        request = make_request(blocks=20, max_tokens=1000, slo=Slo(tbt_slo_s=bound_s))
        return require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node

    tight_s = 1.2 * COST.decode_step_s(1, 20 * view.block_size)
    assert decodes_on(tight_s) == "p0", "idle: there are no prompts to take from"
    view.prefill_demand.add(1e6, 0.0)
    assert decodes_on(tight_s) == "d0"
    view.copy_price.restore(10.0)
    assert decodes_on(tight_s) == "p0"


def test_a_sequence_takes_more_of_a_node_whose_steps_have_prompts_and_are_longer():
    view = without_inline(make_view(1, 1))
    step_s = COST.decode_step_s(1, 20 * view.block_size)
    request = make_request(blocks=20, max_tokens=1000, slo=Slo(tbt_slo_s=10 * step_s))
    # keeping 20 blocks spares a third of what it has of steps with prompts
    around_s = COST.step.around_chunks_s(1, 20 * view.block_size)
    view.copy_price.restore(view.mean_output_tokens * around_s / 3 / (LATER * 20))
    view.node(NodeId("d0")).evict_share = 1.0

    def decodes_on(prompts_s):
        view.prefill_demand.restore(prompts_s, 0.0)
        return require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node

    assert decodes_on(0.0) == decodes_on(0.5) == "p0", "most steps have no prompt"
    assert decodes_on(1.0) == "d0"


def test_a_node_that_was_learned_to_decode_slowly_takes_more_from_its_prompts():
    view = without_inline(make_view(1, 1))
    view.copy_price.restore(0.005)
    view.node(NodeId("d0")).evict_share = 1.0
    view.prefill_demand.add(1e6, 0.0)
    loose_s = 20 * COST.decode_step_s(1, 20 * view.block_size)
    request = make_request(blocks=20, max_tokens=1000, slo=Slo(tbt_slo_s=loose_s))
    assert require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node == "p0"
    view.corrections.restore("p0", "decode", 5.0)
    assert require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node == "d0"


def test_a_prompt_of_which_a_vector_is_wanted_is_lent_nothing():
    view = full_decode(make_view(1, 1))
    placement = require_placement(place(make_request(max_tokens=0), view, COST, 0.0, FOLLOW))
    assert placement.decode_node == placement.prefill_node == "p0"


def test_a_prefill_node_lends_nothing_where_a_usual_prompt_would_then_be_late():
    view = full_decode(make_view(1, 1))
    request = make_request(slo=Slo(ttft_slo_s=1_000.0))
    view.mean_prefill_s = 1.0
    assert require_placement(place(request, view, COST, 0.0, FOLLOW)).decode_node == "p0"
    view.mean_prefill_s = 900.0
    assert isinstance(place(request, view, COST, 0.0, FOLLOW), Rejection)
    # who names no bound asks for nothing to be in time
    assert require_placement(place(make_request("b"), view, COST, 0.0, FOLLOW)).decode_node == "p0"


def test_a_decode_node_that_computes_a_prompt_is_chosen_after_others():
    view = make_view(1, 2)
    first = make_request("a")
    placement = require_placement(place(first, view, COST, 0.0, FIXED))
    node = view.node(placement.decode_node)
    view.placed(first, replace(placement, prefill_node=node.info.node_id), 0.0)
    step_s = view.load_of(node.info.node_id, 0.0)[1]
    assert view.decode_order.values[node.slot] == 1.5 * step_s
    view.prefill_done(RequestId("a"), 1.0)
    assert view.decode_order.values[node.slot] == step_s


def test_a_dead_nodes_requests_say_nothing_of_who_has_its_slot():
    view = full_decode(make_view(1, 1))
    requests = [make_request(f"r{number}", first_block=100 * number) for number in range(2)]
    for request in requests:
        placed(view, request)
        view.prefill_done(request.request_id, 0.0)
    view.remove_node(NodeId("p0"))
    assert view.lent_mask == 0
    assert view.add_node(make_info("p9", Role.PREFILL), 1.0).slot == 0
    view.finished(requests[0].request_id, 2.0)
    assert view.lent_mask == 0


def test_a_prefill_node_keeps_a_place_in_its_steps_for_prompts():
    view = make_view(0, 1)
    view.add_node(make_info("p0", Role.PREFILL, max_batch=3), 0.0)
    full_decode(view)
    for number in range(2):
        assert placed(view, make_request(f"r{number}", first_block=100 * number)).decode_node == "p0"
    refused = place(make_request("last", first_block=900), view, COST, 0.0, FOLLOW)
    assert isinstance(refused, Rejection)
