"""Role changes: a node drifts to the more loaded pool where that is less loaded after, and only there."""

from dataclasses import replace

import pytest

from base.request import NodeId, Role, Slo
from base.step_budget import KEPT_MEAN
from conductor.placing.cost_model import CostModel
from conductor.placing.fading_rate import FADES_S
from conductor.placing.roles import HOLD_S, STEP_S, RoleController, decode_demand
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import make_cost, make_heartbeat, make_request, make_view, require_placement

COST = make_cost()
UNREFUSED = SchedulerSettings(RejectPolicy.NONE)


def prompts(view, count=30, now_s=0.0):
    """Place `count` long prompts that decode next to nothing."""
    for number in range(count):
        request = make_request(f"p{now_s}-{number}", blocks=20, first_block=100 * number, max_tokens=1)
        view.placed(request, require_placement(place(request, view, COST, now_s)), now_s)


def sequences(view, count, tbt_s):
    """Let `count` sequences decode, each with a bound on its mean gap."""
    for number in range(count):
        request = make_request(f"s{number}", 2, 1_000 * number, slo=Slo(tbt_slo_s=tbt_s))
        placement = require_placement(place(request, view, COST, 0.0, UNREFUSED))
        view.placed(request, placement, 0.0)
        view.prefill_done(request.request_id, 0.0)


def changes(controller, view, until_s, start_s=0):
    """Step, and do at once what is decided; return (moment, role) of each change."""
    found = []
    for now_s in range(start_s, until_s):
        change = controller.step(view, float(now_s))
        if change is not None:
            view.set_roles(change.node_id, frozenset({change.role}), float(now_s))
            found.append((now_s, change.role))
    return found


def test_a_decode_node_prefers_prompts_within_seconds_when_those_pile_up():
    view = make_view(2, 4)
    prompts(view)
    found = changes(RoleController(COST), view, 6)
    assert found
    assert found[0][1] is Role.PREFILL
    assert STEP_S + HOLD_S <= found[0][0] <= 4
    assert view.prefill_mask.bit_count() > 2


@pytest.mark.parametrize("fixed_s", [0.0, 0.5])
def test_what_a_step_takes_for_any_prompt_is_shared_by_those_that_come_together(fixed_s):
    cost = CostModel(replace(COST.profile, prefill_fixed_s=fixed_s))
    view = make_view(2, 4, cost)
    for number in range(100):
        request = make_request(f"p{number}", blocks=1, first_block=100 * number, max_tokens=1)
        view.placed(request, require_placement(place(request, view, cost, 0.0, UNREFUSED)), 0.0)
    without = CostModel(replace(COST.profile, prefill_fixed_s=0.0)).prefill_s(
        make_request(blocks=1).num_tokens, 0
    )
    assert view.prefill_demand.at(0.0) == pytest.approx(100 * without / FADES_S, rel=0.01)


def test_a_prefill_node_prefers_to_decode_when_steps_come_near_their_bounds():
    view = make_view(4, 2)
    sequences(view, 40, 1.05 * COST.decode_step_s(20, 20 * 1_200))
    found = changes(RoleController(COST), view, 6)
    assert found
    assert found[0][1] is Role.DECODE


@pytest.mark.parametrize(("load", "role"), [(0.6, None), (0.75, Role.DECODE)])
def test_decode_nodes_are_full_before_their_bounds(load, role):
    view = make_view(4, 2)
    fixed_s, step_s = COST.profile.decode_fixed_s, COST.decode_step_s(20, 20 * 1_200)
    sequences(view, 40, (fixed_s + (step_s - fixed_s) / load) / KEPT_MEAN)
    assert decode_demand(view, COST) == pytest.approx(2 * load, rel=0.05)
    assert next((role for _, role in changes(RoleController(COST), view, 20)), None) is role


def test_a_change_drains_nothing_and_forgets_no_work():
    view = make_view(2, 2)
    sequences(view, 8, 10.0)
    prompts(view)
    work = {node.info.node_id: (node.decode_sequences, node.queued_s) for node in view.nodes()}
    assert changes(RoleController(COST), view, 8)
    assert {node.info.node_id: (node.decode_sequences, node.queued_s) for node in view.nodes()} == work
    assert view.lent_mask, "what decodes on a node that now prefers prompts is in their prediction"
    for number in range(8):
        view.finished(make_request(f"s{number}").request_id, 9.0, 5)
    for number in range(30):
        view.finished(make_request(f"p0.0-{number}").request_id, 9.0)
    assert {(node.decode_sequences, node.queued_s, node.peak_tokens) for node in view.nodes()} == {
        (0, 0.0, 0.0)
    }
    assert not view.lent_mask


def test_a_short_burst_changes_nothing():
    view = make_view(2, 4)
    controller = RoleController(COST)
    prompts(view, count=30)
    assert not changes(controller, view, 1)
    for number in range(30):
        view.finished(make_request(f"p0.0-{number}").request_id, 1.0)
    assert not changes(controller, view, 60, start_s=40)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_the_last_node_of_a_role_stays(sizes):
    view = make_view(*sizes)
    prompts(view)
    assert not changes(RoleController(COST), view, 60)


def test_an_idle_cluster_stays_as_it_is():
    assert not changes(RoleController(COST), make_view(3, 3), 100)


def test_what_was_changed_is_not_changed_back_under_the_same_load():
    view = make_view(2, 6)
    controller = RoleController(COST)
    found = []
    for second in range(40):
        prompts(view, 3, float(second))
        found += changes(controller, view, second + 1, start_s=second)
    assert found
    assert {role for _, role in found} == {Role.PREFILL}
    assert len(found) <= 5


def test_nodes_of_both_roles_are_left_alone():
    view = make_view(1, 1)
    for node in view.nodes():
        view.set_roles(node.info.node_id, frozenset(Role), 0.0)
    prompts(view)
    assert not changes(RoleController(COST), view, 30)


def test_a_node_that_dies_before_it_has_changed_is_not_waited_for():
    view = make_view(2, 4)
    prompts(view)
    controller = RoleController(COST)
    first = next(change for now_s in range(30) if (change := controller.step(view, float(now_s))))
    view.remove_node(NodeId(first.node_id))
    second = next(change for now_s in range(30, 60) if (change := controller.step(view, float(now_s))))
    assert second.node_id != first.node_id


def test_a_role_whose_last_node_died_is_given_to_another():
    view = make_view(1, 2)
    view.remove_node(NodeId("p0"))
    assert changes(RoleController(COST), view, 5) == [(1, Role.PREFILL)]
    view = make_view(1, 1)
    view.remove_node(NodeId("p0"))
    assert not changes(RoleController(COST), view, 5)


def test_another_conductors_sequences_on_a_prefill_node_are_counted():
    view = make_view(1, 1)
    beat = make_heartbeat(num_running=5, num_step_rows=3, num_context_tokens=900)
    view.heartbeat(NodeId("p0"), beat, 1.0)
    node = view.node(NodeId("p0"))
    assert (node.decode_sequences, view.lent_mask) == (3, 1 << node.slot)
    view.heartbeat(NodeId("p0"), make_heartbeat(), 2.0)
    assert (node.decode_sequences, view.lent_mask) == (0, 0)


@pytest.mark.parametrize(("num_prompts", "changed"), [(1, False), (2, True)])
def test_a_prompt_that_is_computed_is_no_queue(num_prompts, changed):
    view = make_view(1, 4)
    for number in range(num_prompts):
        request = make_request(f"p{number}", blocks=400, first_block=5_000 * number, max_tokens=1)
        view.placed(request, require_placement(place(request, view, COST, 0.0, UNREFUSED)), 0.0)
    view.prefill_demand.restore(0.0, 0.0)  # only the queue is looked at
    assert bool(changes(RoleController(COST), view, 6)) is changed


def test_a_cluster_of_many_nodes_drifts_as_far_as_one_of_few():
    view = make_view(2, 14)
    prompts(view, count=120)
    found = changes(RoleController(COST), view, 30)
    assert len(found) > 3, "a single node more would hardly be felt"
    assert {role for _, role in found} == {Role.PREFILL}


def test_one_sequence_whose_bound_no_split_can_keep_turns_one_node_at_most():
    view = make_view(6, 2)
    sequences(view, 1, 1.0001 * COST.profile.decode_fixed_s / KEPT_MEAN)
    assert decode_demand(view, COST) <= 1.0
    assert not changes(RoleController(COST), view, 60)


def test_slower_steps_than_predicted_are_more_demand():
    view = make_view(2, 2)
    sequences(view, 8, 4 * COST.decode_step_s(4, 4 * 1_200))
    before = decode_demand(view, COST)
    for node in view.nodes():
        view.corrections.observe(node.info.node_id, "decode", 1.0, 3.0)
    assert decode_demand(view, COST) > 2 * before


def test_what_one_conductor_saw_is_no_reason_for_the_next():
    view = make_view(2, 4)
    controller = RoleController(COST)
    prompts(view)
    controller.step(view, 0.0)
    controller.step(view, 8.0)
    controller.forget()
    for number in range(30):
        view.finished(make_request(f"p0.0-{number}").request_id, 9.0)
    assert not changes(controller, view, 100, start_s=90)
