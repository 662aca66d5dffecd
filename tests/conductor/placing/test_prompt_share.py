"""The predicted share of prompts is what the budgets of steps give them."""

from math import inf

import pytest

from base.request import NodeId, RequestId, Role, Slo
from base.step_budget import KEPT_MEAN, BudgetedStep, DecodeLoad, target_gap_s
from base.step_cost import attended_by
from conductor.placing.cost_model import CostModel
from conductor.placing.prompt_share import prompt_share, share_beside, share_when_begun
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from tests.conductor.builders import make_cost, make_info, make_request, make_view, require_placement

COST = make_cost()
STEPS = 2_000
PROFILES = ("h200-llama8b", "h200-llama8b-fp8", "h200-llama8b-int4", "h100-llama8b", "a800-llama70b")
LOADS = ((1, 8_000), (4, 32_000), (20, 160_000), (60, 24_000))
BOUNDS_S = (0.008, 0.015, 0.03, 0.1, inf)


def given_share(cost, batch, context_tokens, bound_s, chunk_tokens=8_192):
    """Return what prompts without end have of the seconds of many steps, as their budgets are."""
    step, length_s = cost.step, KEPT_MEAN * bound_s
    most = chunk_tokens - min(batch, chunk_tokens // 2)
    step_s = step.decode_step_s(batch, context_tokens)
    left_s, starved, spent_s, tokens = length_s, 0, 0.0, 0
    for _ in range(STEPS):
        if bound_s == inf:
            load = DecodeLoad(batch, context_tokens, longest_left_s=target_gap_s(step_s))
        else:
            load = DecodeLoad(batch, context_tokens, mean_left_s=left_s, saving_s=length_s - step_s)
        taken = BudgetedStep(most, step, load, starved, num_prompts=1).take(8_192, 0)
        took_s = step_s
        if taken:
            took_s = step.with_chunks_s(taken, attended_by(taken, 0), batch, context_tokens)
        starved = 0 if taken else starved + 1
        left_s += length_s - took_s
        spent_s += took_s
        tokens += taken
    return tokens * step.prefill_token_s / spent_s


def predicted_share(cost, batch, context_tokens, bound_s, chunk_tokens=0):
    view = make_view(0, 0, cost=cost)
    view.add_node(make_info("n0", Role.PREFILL, Role.DECODE, chunk_tokens=chunk_tokens), 0.0)
    step_s = cost.decode_step_s(batch, context_tokens)
    return prompt_share(view.node(NodeId("n0")), batch, context_tokens, step_s, bound_s, cost)


def predicted_over_given(profile, most, *chunk_tokens):
    """Return ratios of all loads and bounds of which a step alone takes a share of `most` at most."""
    cost, ratios = CostModel(load_profile(profile)), []
    for batch, context_tokens in LOADS:
        for bound_s in BOUNDS_S:
            if cost.decode_step_s(batch, context_tokens) <= most * KEPT_MEAN * bound_s:
                case = batch, context_tokens, bound_s, *chunk_tokens
                ratios.append(predicted_share(cost, *case) / given_share(cost, *case))
    assert len(ratios) >= 8
    return ratios


@pytest.mark.parametrize("profile", PROFILES)
def test_prompts_have_the_share_of_steps_that_was_predicted(profile):
    ratios = predicted_over_given(profile, 0.9)
    assert 0.9 < sorted(ratios)[len(ratios) // 2] < 1.1
    assert all(0.9 < ratio < 1.4 for ratio in ratios)


@pytest.mark.parametrize("profile", PROFILES)
def test_prompts_have_no_more_of_a_step_than_its_chunk(profile):
    ratios = predicted_over_given(profile, 0.8, 512)
    assert all(0.9 < ratio < 1.1 for ratio in ratios)


def test_a_step_as_long_as_its_bound_leaves_prompts_nothing():
    assert share_beside(0.02, 0.01, 0.02, 0.0) == 0.0
    assert share_beside(0.03, 0.01, 0.02, 0.003) < 0.0


def test_a_bound_that_steps_alone_are_past_binds_no_prompt():
    view = make_view(0, 0)
    view.add_node(make_info("n0", Role.PREFILL, Role.DECODE), 0.0)
    node = view.node(NodeId("n0"))
    for number in range(4):
        request = make_request(f"r{number}", first_block=100 * number, slo=Slo(tbt_slo_s=1e-3))
        settings = SchedulerSettings(RejectPolicy.NONE)
        view.placed(request, require_placement(place(request, view, COST, 0.0, settings)), 0.0)
        view.prefill_done(request.request_id, 0.0)
    assert node.tightest_tbt_s == 1e-3
    lost = share_when_begun(node, COST)
    node.tightest_tbt_s = inf
    assert lost == share_when_begun(node, COST) > 0.9


def test_a_node_of_both_roles_predicts_prompts_beside_those_who_decode_and_no_others():
    view = make_view(0, 0)
    view.add_node(make_info("n0", Role.PREFILL, Role.DECODE), 0.0)
    first = require_placement(place(make_request("a"), view, COST, 0.0))
    view.placed(make_request("a"), first, 0.0)
    view.prefill_done(RequestId("a"), 1.0)
    beside = require_placement(place(make_request("b", first_block=500), view, COST, 1.0))
    assert beside.prompt_share == share_when_begun(view.node(NodeId("n0")), COST) < first.prompt_share == 1.0
    assert beside.prefill_s == pytest.approx(first.prefill_s / beside.prompt_share)
    view.finished(RequestId("a"), 2.0, 5)
    after = require_placement(place(make_request("b", first_block=500), view, COST, 2.0))
    assert (after.prompt_share, after.prefill_s) == (1.0, first.prefill_s)
