"""Placement: Algorithm 1 against a plain scan of all nodes, and what it must never do."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.placement import Rejection, RejectReason
from conductor.placing.prefill_policies import matched_tokens
from conductor.placing.scheduler import Turn, a_finish_s, is_final, place, turn_of
from conductor.placing.scheduler_settings import DEFAULT_SETTINGS, RejectPolicy, SchedulerSettings
from tests.conductor.builders import (
    BLOCK_SIZE,
    make_cost,
    make_heartbeat,
    make_info,
    make_request,
    make_view,
    require_placement,
    tbt_slo_for,
)

COST = make_cost()


def random_cluster(rng, num_prefill: int = 6):
    """A view with random caches and queues; returns it with each prefill node's blocks."""
    view = make_view(num_prefill, 2)
    held = {}
    for slot in range(num_prefill):
        held[slot] = rng.choice([0, 0, 1, 3, 8, 20])
        view.index.store(slot, range(held[slot]))
        view.prefill_order.set(slot, rng.choice([0.0, 0.0, rng.random() * 3]))
    return view, held


def least_ttft_by_scan(view, held, request) -> float:
    """Seconds until the last layer on the best node, every node looked at."""
    best_blocks = min(max(held.values()), len(request.chain))
    seconds = []
    for slot, blocks in held.items():
        queue_s = view.prefill_order.values[slot]
        own = matched_tokens(request, min(blocks, len(request.chain)), view)
        most = matched_tokens(request, best_blocks, view)
        seconds.append(queue_s + COST.prefill_s(request.num_tokens - own, own))
        if most > own:
            fetch_s = COST.transfer_s(most - own)
            seconds.append(max(queue_s, fetch_s) + COST.prefill_s(request.num_tokens - most, most))
    return min(seconds)


@pytest.mark.parametrize("seed", range(80))
def test_groups_find_what_a_scan_of_all_nodes_finds(seed: int) -> None:
    rng = random.Random(seed)
    view, held = random_cluster(rng)
    request = make_request(blocks=rng.randrange(1, 25))
    placement = require_placement(place(request, view, COST, 0.0))
    ready_s = max(placement.queue_s, placement.fetch_s) + placement.prefill_s
    assert ready_s == pytest.approx(least_ttft_by_scan(view, held, request))


@pytest.mark.parametrize("seed", range(40))
def test_nodes_to_avoid_are_chosen_and_fetched_from_only_where_no_others_are(seed: int) -> None:
    rng = random.Random(seed)
    view, held = random_cluster(rng)
    names = ["p0", "p1", "p2", "p3", "p4", "p5", "d0", "d1"]
    avoid = rng.sample(names, rng.randrange(1, len(names)))
    request = replace(make_request(blocks=rng.randrange(1, 25)), avoid=tuple(avoid))
    placement = require_placement(place(request, view, COST, 0.0))
    assert placement.prefill_node not in avoid or {*names[:6]} <= {*avoid}
    assert placement.decode_node not in avoid or {"d0", "d1"} <= {*avoid}
    assert placement.source_node not in avoid
    if not {*names[:6]} <= {*avoid}:
        others = {slot: blocks for slot, blocks in held.items() if names[slot] not in avoid}
        ready_s = max(placement.queue_s, placement.fetch_s) + placement.prefill_s
        assert ready_s == pytest.approx(least_ttft_by_scan(view, others, request))


def test_a_node_to_avoid_is_chosen_where_the_others_have_no_room() -> None:
    view = make_view(1, 2)
    request = replace(make_request(), avoid=(NodeId("d0"),))
    assert require_placement(place(request, view, COST, 0.0)).decode_node == "d1"
    view.refused(NodeId("d1"), 0.0)
    assert require_placement(place(request, view, COST, 0.0)).decode_node == "d0"


def test_a_lone_node_takes_a_prompt_that_fits_once_and_no_longer_one() -> None:
    view = make_view(0, 0)
    view.add_node(make_info("n0", Role.PREFILL, Role.DECODE, num_blocks=10), 0.0)
    request = make_request(blocks=9, max_tokens=1)
    placement = require_placement(place(request, view, COST, 0.0))
    assert (placement.prefill_node, placement.decode_node, placement.handoff_s) == ("n0", "n0", 0.0)
    rejection = place(make_request(blocks=11, max_tokens=1), view, COST, 0.0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is RejectReason.NO_FREE_BLOCKS


def test_an_empty_node_takes_a_prompt_whose_answer_may_end_with_its_cache_and_a_used_one_does_not() -> None:
    view = make_view(1, 0)
    view.add_node(make_info("d0", Role.DECODE, num_blocks=10), 0.0)
    request = make_request(blocks=9, max_tokens=2 * BLOCK_SIZE)
    view.mean_output_tokens = 2.0 * BLOCK_SIZE
    assert require_placement(place(request, view, COST, 0.0)).decode_node == "d0"
    view.heartbeat(NodeId("d0"), make_heartbeat(num_free_blocks=9), 0.0)
    assert isinstance(place(request, view, COST, 0.0), Rejection)


def test_a_node_that_computes_decodes_too_unless_another_has_a_shorter_step() -> None:
    view = make_view(0, 0)
    for name in ("n0", "n1"):
        view.add_node(make_info(name, Role.PREFILL, Role.DECODE), 0.0)
    view.index.store(1, range(10))
    placement = require_placement(place(make_request(blocks=10), view, COST, 0.0))
    assert (placement.prefill_node, placement.decode_node) == ("n1", "n1")
    for number in range(40):
        busy = make_request(f"b{number}")
        made = require_placement(place(busy, view, COST, 0.0))
        view.placed(busy, replace(made, decode_node=NodeId("n1")), 0.0)
        view.prefill_done(busy.request_id, 0.0)
    placement = require_placement(place(make_request(blocks=10), view, COST, 0.0))
    assert (placement.prefill_node, placement.decode_node) == ("n1", "n0")


@pytest.mark.parametrize("seed", range(20))
def test_equal_views_give_equal_placements(seed: int) -> None:
    first, _ = random_cluster(random.Random(seed))
    second, _ = random_cluster(random.Random(seed))
    request = make_request()
    assert place(request, first, COST, 0.5) == place(request, second, COST, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_placement_leaves_the_view_as_it_was(seed: int) -> None:
    view, _ = random_cluster(random.Random(seed))
    request = make_request()
    assert place(request, view, COST, 0.5) == place(request, view, COST, 0.5)


@given(st.integers(0, 20), st.integers(0, 20))
@settings(deadline=None)
def test_longer_match_at_equal_load_is_never_worse(first: int, second: int) -> None:
    request = make_request(blocks=20)
    ready = []
    for blocks in sorted((first, second)):
        view = make_view(1, 1)
        view.index.store(0, range(blocks))
        placement = require_placement(place(request, view, COST, 0.0))
        ready.append(placement.predicted_ttft_s)
    assert ready[1] <= ready[0] + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_draining_removed_and_wrong_role_nodes_are_never_chosen(seed: int) -> None:
    rng = random.Random(seed)
    view, _ = random_cluster(rng)
    gone, draining = rng.sample(["p0", "p1", "p2", "p3", "p4", "p5"], 2)
    view.remove_node(NodeId(gone))
    for name in (draining, "d0"):
        view.heartbeat(NodeId(name), make_heartbeat(is_draining=True), 0.0)
    for number in range(10):
        placement = require_placement(place(make_request(f"r{number}", blocks=12), view, COST, 0.0))
        assert placement.prefill_node not in (gone, draining)
        assert placement.prefill_node.startswith("p")
        assert placement.decode_node == "d1"


def test_ties_go_to_the_smaller_slot() -> None:
    placement = require_placement(place(make_request(), make_view(4, 4), COST, 0.0))
    assert (placement.prefill_node, placement.decode_node) == ("p0", "d0")


def test_burst_is_spread_before_any_node_reports() -> None:
    view = make_view(4, 4)
    chosen = []
    for number in range(4):
        request = make_request(f"r{number}", first_block=100 * number)
        placement = require_placement(place(request, view, COST, 0.0))
        view.placed(request, placement, 0.0)
        chosen.append((placement.prefill_node, placement.decode_node))
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p2", "d2"), ("p3", "d3")]


def test_prefix_is_fetched_from_a_busy_holder() -> None:
    view = make_view(2, 1)
    view.index.store(0, range(40))
    view.prefill_order.set(0, 30.0)
    placement = require_placement(place(make_request(blocks=41), view, COST, 0.0))
    assert placement.prefill_node == "p1"
    assert (placement.source_node, placement.local_blocks, placement.matched_blocks) == ("p0", 0, 40)
    assert placement.matched_tokens == 40 * BLOCK_SIZE


def test_short_wait_for_the_holder_beats_a_fetch() -> None:
    view = make_view(2, 1)
    view.index.store(0, range(40))
    view.prefill_order.set(0, 0.01)
    placement = require_placement(place(make_request(blocks=41), view, COST, 0.0))
    assert (placement.prefill_node, placement.source_node) == ("p0", None)


def test_threshold_of_the_paper_overrides_the_cost_model() -> None:
    view = make_view(1, 1)
    view.index.store(0, range(10))
    view.add_node(make_info("holder", Role.DECODE), 0.0)
    view.index.store(2, range(20))
    request = make_request(blocks=21)
    never = SchedulerSettings(kvcache_balancing_threshold=3.0)
    always = SchedulerSettings(kvcache_balancing_threshold=1.5)
    assert require_placement(place(request, view, COST, 0.0, never)).source_node is None
    assert require_placement(place(request, view, COST, 0.0, always)).source_node == "holder"


def test_last_prompt_token_is_computed_even_if_all_blocks_match() -> None:
    view = make_view(1, 1)
    view.index.store(0, range(10))
    placement = require_placement(place(make_request(blocks=10), view, COST, 0.0))
    assert placement.matched_tokens == 10 * BLOCK_SIZE - 1


def test_decode_node_that_holds_the_prompt_wins_at_equal_load() -> None:
    view = make_view(1, 3)
    view.index.store(2, range(10))
    placement = require_placement(place(make_request(), view, COST, 0.0))
    assert (placement.decode_node, placement.decode_matched_blocks) == ("d1", 10)


def test_cluster_without_a_role_rejects() -> None:
    for view, reason in (
        (make_view(0, 1), RejectReason.NO_PREFILL_NODE),
        (make_view(1, 0), RejectReason.NO_DECODE_NODE),
    ):
        result = place(make_request(), view, COST, 0.0)
        assert isinstance(result, Rejection)
        assert result.reason is reason


def test_prompt_that_fits_no_decode_node_is_rejected() -> None:
    result = place(make_request(blocks=3_000), make_view(), COST, 0.0)
    assert isinstance(result, Rejection)
    assert result.reason is RejectReason.NO_FREE_BLOCKS


def test_who_finds_no_blocks_waits_if_enough_requests_are_expected_to_end_in_time() -> None:
    view, asked = make_view(1, 0), replace(make_request("late", blocks=6), waited_s=1.0)
    view.add_node(make_info("d0", Role.DECODE, num_blocks=10), 0.0)
    first = make_request("first", blocks=6, first_block=100)
    view.placed(first, require_placement(place(first, view, COST, 0.0)), 0.0)
    result = place(asked, view, COST, 0.0)
    assert isinstance(result, Rejection)
    assert result.reason is RejectReason.NO_FREE_BLOCKS
    view.num_waiting = 3
    # who is next needs one to end, however many wait behind it; a later one as many more as are before it
    for turn, ahead_s, num_ends in [(Turn.NOW, 0.0, 1), (Turn.LATER_IF_PROMISING, 1.0, 4)]:
        ended_s = asked.waited_s + num_ends * a_finish_s(view)
        for patience_s, waits in [(ended_s * 1.01, True), (ended_s * 0.99, False), (float("inf"), True)]:
            assert is_final(result, turn, asked, ahead_s, view, patience_s, has_begun=False) is not waits
    assert not is_final(result, Turn.NOW, asked, 0.0, view, 0.0, has_begun=True)
    bounded = replace(asked, slo=Slo(ttft_slo_s=1e3))
    assert is_final(result, Turn.NOW, bounded, 0.0, view, float("inf"), has_begun=False)
    larger = make_request("larger", blocks=10)
    rejection = place(larger, view, COST, 0.0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is RejectReason.NO_FREE_BLOCKS
    assert is_final(rejection, Turn.NOW, larger, 0.0, view, float("inf"), has_begun=False)


def test_ttft_past_the_slo_is_rejected_with_the_prediction_and_a_wait() -> None:
    view = make_view(1, 1)
    view.prefill_order.set(0, 20.0)
    request = make_request(slo=Slo(ttft_slo_s=5.0))
    result = place(request, view, COST, 0.0)
    assert isinstance(result, Rejection)
    assert result.reason is RejectReason.TTFT
    assert result.predicted_ttft_s > 20.0
    assert result.retry_after_s == pytest.approx(result.predicted_ttft_s - 5.0)
    unbounded = SchedulerSettings(reject=RejectPolicy.NONE)
    require_placement(place(request, view, COST, 0.0, unbounded))


def fill_decode(view, count: int, prefilled: bool) -> None:
    for number in range(count):
        request = make_request(f"f{number}", blocks=20, first_block=1_000 * number)
        placement = require_placement(place(request, view, COST, 0.0))
        view.placed(request, placement, 0.0)
        if prefilled:
            view.prefill_done(request.request_id, 0.0)


def test_early_rejection_sees_what_decodes_but_not_what_is_in_prefill() -> None:
    request = make_request(slo=Slo(tbt_slo_s=0.035))
    early = SchedulerSettings(reject=RejectPolicy.EARLY)
    predict = SchedulerSettings(reject=RejectPolicy.PREDICT)
    view = make_view(40, 1)
    fill_decode(view, 40, prefilled=False)
    require_placement(place(request, view, COST, 0.0, early))
    result = place(request, view, COST, 0.0, predict)
    assert isinstance(result, Rejection)
    assert result.reason is RejectReason.TBT
    view = make_view(40, 1)
    fill_decode(view, 40, prefilled=True)
    assert isinstance(place(request, view, COST, 0.0, early), Rejection)


def test_early_rejection_tests_the_pool_and_not_the_node_that_was_chosen() -> None:
    view = make_view(40, 2)
    fill_decode(view, 40, prefilled=False)
    for number in range(40):
        if view.decode_node(RequestId(f"f{number}")).info.node_id == "d0":
            view.prefill_done(RequestId(f"f{number}"), 0.0)
    crowded, mean = view.node(NodeId("d0")), view.running_context_tokens / 2
    assert crowded.running_context_tokens == 2 * mean
    request = make_request()
    node_s = COST.decode_step_s(crowded.running_sequences + 1, 2 * mean + request.num_tokens)
    pool_s = COST.decode_step_s(crowded.running_sequences / 2 + 1, mean + request.num_tokens)
    early = SchedulerSettings(reject=RejectPolicy.EARLY)
    between = Slo(tbt_slo_s=tbt_slo_for((node_s + pool_s) / 2, COST))
    placement = require_placement(place(make_request(slo=between), view, COST, 0.0, early))
    assert placement.decode_node == "d0"
    assert isinstance(place(make_request(slo=Slo(tbt_slo_s=pool_s)), view, COST, 0.0, early), Rejection)


def test_work_of_a_placement_does_not_grow_with_the_nodes() -> None:
    probes = []
    for num_nodes in (8, 500):
        view = make_view(num_nodes, num_nodes)
        for slot in range(num_nodes):
            view.index.store(slot, [0])
        view.prefill_order.num_probes = view.decode_order.num_probes = 0
        place(make_request(), view, COST, 1.0)
        probes.append(view.prefill_order.num_probes + view.decode_order.num_probes)
    assert probes[1] <= probes[0] + 4


def test_a_prompt_of_which_nothing_decodes_needs_a_prefill_node_alone_and_leaves_no_trace() -> None:
    view, other = make_view(2, 0), make_view(2, 2)
    request = make_request(max_tokens=0, slo=Slo(tbt_slo_s=1e-9))
    placement = require_placement(place(request, view, COST, 0.0))
    assert placement == require_placement(place(request, other, COST, 0.0))
    assert placement.prefill_node == placement.decode_node == "p0"
    assert placement.handoff_s == placement.predicted_tbt_s == 0.0
    for is_prefilled in (False, True):
        view.placed(request, placement, 0.0)
        assert (view.node("p0").num_queued, view.num_in_flight) == (1, 1)
        if is_prefilled:
            view.prefill_done(request.request_id, 1.0)
        view.finished(request.request_id, 2.0, 0)
        node = view.node("p0")
        assert node.num_queued == node.decode_sequences == node.running_sequences == view.num_in_flight == 0
        assert node.peak_tokens == view.running_sequences == view.running_context_tokens == 0
        assert view.projected(5.0, 2.0) == (0, 0)
        assert view.mean_output_tokens == make_view().mean_output_tokens
    assert turn_of(request.slo, 0.0, view, DEFAULT_SETTINGS, 2.0, decodes=False) is Turn.NOW
    assert turn_of(request.slo, 0.0, view, DEFAULT_SETTINGS, 2.0) is Turn.LATER


def queued(seconds: list[float], mean_prefill_s: float = 2.0):
    """A view of prefill nodes with such queues, where prompts take so long in the mean."""
    view = make_view(len(seconds), 2)
    for slot, queue_s in enumerate(seconds):
        view.prefill_order.set(slot, queue_s)
    view.mean_prefill_s = mean_prefill_s
    return view


AT_ONCE = SchedulerSettings(reject=RejectPolicy.NONE)


def chosen(view, slo: Slo | None = None, settings: SchedulerSettings = AT_ONCE) -> str:
    """The prefill node of a prompt of 20 blocks."""
    return require_placement(place(make_request(blocks=20, slo=slo), view, COST, 0.0, settings)).prefill_node


def test_past_capacity_who_would_wait_long_anywhere_joins_a_quarter_of_the_lines() -> None:
    lines = [21.0, 24.0, 30.0, 22.0, 28.0, 27.0, 25.0, 23.0]
    assert chosen(queued(lines)) == "p4", "the shorter of the two longest lines"
    assert chosen(queued(lines, mean_prefill_s=8.0)) == "p0", "no line of three such prompts"
    assert chosen(queued([2.0, *lines[1:]])) == "p0", "one node has a short line"
    assert chosen(queued(lines, mean_prefill_s=0.0)) == "p0", "nobody knows how long prompts are"


def test_who_names_a_bound_or_waits_before_the_nodes_joins_the_shortest_line() -> None:
    lines = [21.0, 24.0, 30.0, 22.0]
    assert chosen(queued(lines), Slo(ttft_slo_s=60.0)) == "p0"
    assert chosen(queued(lines), settings=SchedulerSettings(reject=RejectPolicy.NONE, ahead_s=0.5)) == "p0"


def test_long_lines_of_nodes_to_avoid_are_not_joined() -> None:
    view = queued([21.0, 24.0, 30.0, 22.0])
    request = replace(make_request(blocks=20), avoid=(NodeId("p2"),))
    assert require_placement(place(request, view, COST, 0.0, AT_ONCE)).prefill_node == "p1"


def test_a_node_with_prompts_of_another_conductor_is_not_idle() -> None:
    view, settings = make_view(1, 1), SchedulerSettings(ahead_s=0.5)
    asked = make_request().slo, 0.0, view, settings
    assert turn_of(*asked, 0.0) is Turn.NOW
    beat = make_heartbeat(num_free_blocks=2_700, num_queued_tokens=40_000, num_waiting=2)
    view.heartbeat(NodeId("p0"), beat, 0.0)
    ends_s = view.prefill_order.values[0]
    assert ends_s > 1.0
    assert turn_of(*asked, 0.0) is Turn.LATER
    assert turn_of(*asked, ends_s - 0.4) is Turn.NOW


def test_a_sequence_goes_where_a_place_in_the_step_is_free_and_is_predicted_to_wait_where_none_is():
    view = make_view(1, 0, COST)
    for name, max_batch in (("d0", 4), ("d1", 8)):
        view.add_node(make_info(name, Role.DECODE, max_batch=max_batch), 0.0)
    chosen = []
    for number in range(16):
        request = make_request(str(number))
        placement = require_placement(place(request, view, COST, 0.0))
        view.placed(request, placement, 0.0)
        chosen.append((placement.decode_node, placement.predicted_tbt_s))
    nodes = [node for node, _ in chosen]
    assert (nodes[:12].count("d0"), nodes[:12].count("d1")) == (4, 8)
    assert nodes[12:].count("d1") > nodes[12:].count("d0")
    step_s = COST.decode_step_s(8, 0)
    assert all(gap_s < 1.1 * step_s for _, gap_s in chosen[:12])
    assert all(gap_s > 1.1 * step_s for _, gap_s in chosen[12:])
