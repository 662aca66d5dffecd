"""When a decode node computes a prompt itself: where that is sooner, beside what decodes there."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.request import NodeId, RequestId, Role, Slo
from base.step_budget import KEPT_MEAN, target_gap_s
from conductor.placing.placement import PlacementRequest, RejectReason
from conductor.placing.prompt_share import LEAST_SHARE
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from tests.conductor.builders import (
    BLOCK_SIZE,
    make_cost,
    make_info,
    make_request,
    make_view,
    require_placement,
)

COST = make_cost()
INLINE = SchedulerSettings(RejectPolicy.NONE, roles_follow=True)


def short_request(tokens, name="short", slo=None):
    chain = range(tokens // BLOCK_SIZE)
    return PlacementRequest(RequestId(name), chain, tokens, 300, slo or Slo())


def decoding(view, count, tbt_slo_s=inf):
    """Let `count` sequences decode on d0."""
    for number in range(count):
        request = make_request(f"r{number}", 2, 1_000 * number, slo=Slo(tbt_slo_s=tbt_slo_s))
        placement = require_placement(place(request, view, COST, 0.0, SchedulerSettings(RejectPolicy.NONE)))
        view.placed(request, placement, 0.0)
        view.prefill_done(request.request_id, 0.0)


def placed(view, request, settings=INLINE):
    return require_placement(place(request, view, COST, 0.0, settings))


def line_that_goes_beside(view, request):
    """Return the number of those who wait from which a decode node computes the request."""
    for view.num_waiting in range(400):
        if placed(view, request).is_inline:
            return view.num_waiting
    return 400


def test_a_short_prompt_on_an_idle_decode_node_is_computed_there():
    view = make_view(1, 1)
    view.prefill_order.set(0, 5.0)
    placement = placed(view, short_request(600))
    assert (placement.prefill_node, placement.decode_node, placement.is_inline) == ("d0", "d0", True)
    assert placement.handoff_s == placement.fetch_s == 0.0


def test_a_long_prompt_is_computed_where_most_of_its_kv_is():
    view = make_view(1, 1)
    view.corrections.restore("d0", "prefill", 1.1)
    long = make_request(blocks=20)
    assert not placed(view, long).is_inline
    view.kv_events(NodeId("d0"), 1, list(long.chain[:18]), [])
    placement = placed(view, long)
    assert (placement.is_inline, placement.matched_tokens) == (True, 18 * BLOCK_SIZE)


def test_a_long_prompt_is_computed_where_it_decodes_if_prefill_nodes_have_a_queue():
    view = make_view(1, 1)
    decoding(view, 3, 0.5)
    long = make_request(blocks=40)
    before = placed(view, long)
    view.prefill_order.set(0, 60.0)
    after = placed(view, long)
    assert after.is_inline
    assert after.prefill_s > before.prefill_s
    assert after.predicted_ttft_s < 60.0


def test_who_waits_behind_counts_for_each_second_of_a_prefill_node():
    view, long = make_view(2, 1), make_request(blocks=40)
    decoding(view, 6, 0.05)
    alone = placed(view, long)
    view.num_waiting = 1  # the request itself, the first of the line
    assert placed(view, long) == alone
    assert not alone.is_inline
    # with twice as many prefill nodes each of them loses half as much
    wider = make_view(4, 1)
    decoding(wider, 6, 0.05)
    for either in (view, wider):
        either.corrections.restore("d0", "prefill", 2.0)
    assert 2 < line_that_goes_beside(view, long) < line_that_goes_beside(wider, long) < 400


def test_who_comes_until_the_line_is_gone_counts_as_well():
    lines = []
    for busy in (0.0, 0.3, 0.62, 1.5):
        view, long = make_view(2, 1), make_request(blocks=40)
        decoding(view, 6, 0.05)
        view.corrections.restore("d0", "prefill", 4.0)
        view.prefill_demand.restore(busy * view.num_prefill, 0.0)
        lines.append(line_that_goes_beside(view, long))
    assert lines[0] > lines[1] > lines[2] == lines[3] > 1


def test_no_prompt_makes_steps_longer_in_a_pool_that_refuses_for_want_of_room():
    view, request = make_view(1, 1), make_request(blocks=40)
    decoding(view, 14, 0.035)
    view.prefill_order.set(0, 30.0)
    assert placed(view, request).is_inline
    for _ in range(20):
        view.rejected(RejectReason.TBT)
    assert not placed(view, request).is_inline
    view.kv_events(NodeId("d0"), 1, list(request.chain[:39]), [])
    assert placed(view, request).is_inline  # the next turn of a chat takes hardly any of a step


def test_nothing_is_computed_by_decode_nodes_unless_it_is_allowed():
    view = make_view(1, 1)
    view.prefill_order.set(0, 5.0)
    assert not placed(view, short_request(600), SchedulerSettings(RejectPolicy.NONE)).is_inline


def test_an_idle_prefill_node_that_is_sooner_is_preferred():
    view = make_view(1, 1)
    view.corrections.restore("d0", "prefill", 20.0)
    assert not placed(view, short_request(600)).is_inline


@given(st.integers(1, 8), st.sampled_from([0.001, 0.03, 0.05, 0.1, 0.3, 1.0, inf]), st.integers(1, 20_000))
@settings(deadline=None, max_examples=60)
def test_a_prompt_has_what_those_who_decode_leave_of_each_step(count, tbt_slo_s, tokens):
    view = make_view(1, 1)
    decoding(view, count, tbt_slo_s)
    view.prefill_order.set(0, 600.0)
    node = view.node(NodeId("d0"))
    step_s = COST.decode_step_s(node.decode_sequences, node.decode_context_tokens)
    length_s = target_gap_s(step_s) if tbt_slo_s == inf else KEPT_MEAN * tbt_slo_s
    # no steps with chunks were measured: what those who decode take of one, but for reading the weights
    around_s = step_s - COST.profile.decode_fixed_s
    share = (length_s - around_s) / length_s if step_s < length_s else 0.0
    placement = placed(view, short_request(tokens))
    assert placement.is_inline == (share >= LEAST_SHARE)
    if placement.is_inline:
        assert placement.prefill_s == pytest.approx(COST.prefill_s(tokens, 0) / share)


def test_the_longest_gap_bounds_a_step_as_well():
    view = make_view(1, 1)
    request = make_request("r", 2, 1_000, slo=Slo(tbt_slo_s=0.5, longest_gap_slo_s=0.2))
    view.placed(request, placed(view, request), 0.0)
    assert view.node(NodeId("d0")).tightest_tbt_s == 0.2
    view.finished(request.request_id, 1.0, 5)
    assert view.node(NodeId("d0")).tightest_tbt_s == inf


def test_a_bound_is_forgotten_with_the_sequence_that_had_it():
    view = make_view(1, 1)
    decoding(view, 2, 0.2)
    node = view.node(NodeId("d0"))
    assert node.tightest_tbt_s == 0.2
    view.finished(RequestId("r0"), 1.0, 5)
    assert node.tightest_tbt_s == 0.2
    view.finished(RequestId("r1"), 1.0, 5)
    assert node.tightest_tbt_s == inf


@pytest.mark.parametrize("tokens", [1, 511, 512, 513])
def test_the_account_of_an_inline_prefill_is_empty_at_its_end(tokens):
    view = make_view(1, 1)
    request = short_request(tokens)
    placement = placed(view, request)
    assert placement.is_inline
    view.placed(request, placement, 0.0)
    assert view.node(NodeId("d0")).num_queued == 1
    view.prefill_done(request.request_id, 1.0)
    view.finished(request.request_id, 2.0, 5)
    node = view.node(NodeId("d0"))
    assert (node.num_queued, node.queued_s, node.queued_tokens, node.decode_sequences) == (0, 0.0, 0, 0)


def test_a_prompt_waits_for_a_place_in_the_step_of_the_node_that_computes_it():
    queues = []
    for max_batch in (0, 8, 4):
        view = make_view(1, 0)
        view.add_node(make_info("d0", Role.DECODE, max_batch=max_batch), 0.0)
        decoding(view, 6)
        view.prefill_order.set(0, 1e4)
        placement = placed(view, short_request(600))
        assert placement.is_inline
        queues.append(placement.queue_s)
    assert queues[0] == queues[1]
    step_s = COST.placed_step_s(6, view.node(NodeId("d0")).running_context_tokens, 4)
    assert queues[2] == pytest.approx(step_s * (1 + 3 * view.mean_output_tokens / 4))
