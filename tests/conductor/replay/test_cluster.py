"""The event loop: every request ends once, the clock only rises, work is conserved."""

import dataclasses
import random
from math import inf

import pytest

from base.errors import ConfigError
from base.request import NodeId, Slo
from bench.gap_counts import GapCounts
from bench.papers.peers import RULES, peer_policy
from conductor.placing.cost_model import CostModel
from conductor.placing.roles import RoleController
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.faults import NodeFault
from conductor.replay.policies import POLICIES
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import NamedBounds, Trace, TraceRequest, arrivals
from conductor.replay.trace_formats import read_trace
from tests.conductor.replay.builders import REJECTING, SHARED_TRACE, TIGHT, run, small_trace

COST = CostModel(load_profile("a800-llama70b"))


class WatchedCluster(SimCluster):
    """A cluster whose every event is checked against the one before."""

    last_s = 0.0

    def _sample(self) -> None:
        assert self.now_s >= self.last_s, "the clock went back"
        self.last_s = self.now_s
        self.view.prefill_order.check()
        self.view.decode_order.check()
        super()._sample()


def check_ends(cluster: SimCluster, num_requests: int) -> None:
    outcomes = cluster.outcomes
    assert outcomes.num_arrived == num_requests
    assert outcomes.num_completed + outcomes.num_rejected == num_requests
    assert cluster.view.num_in_flight == 0
    assert cluster.view.running_sequences == 0
    cluster.view.index.check()
    for node in cluster.nodes:
        assert not node.sends.lanes
        if node.node_id in cluster.view.node_ids():
            assert cluster.view.index.num_blocks(cluster.view.node(node.node_id).slot) == len(node.cache)
        engine = node.engine
        assert (engine.num_waiting, engine.num_prompts, engine.batch, engine.context_tokens) == (0, 0, 0, 0)


def test_a_node_has_the_steps_of_the_device_that_its_profile_was_measured_on() -> None:
    others = (("d0", load_profile("a800-llama70b")), ("d1", load_profile("cpu-smollm2")))
    alike = [(name, dataclasses.replace(each, kv_token_bytes=131_072)) for name, each in others]
    options = ClusterOptions(
        1, 2, 512, settings=SchedulerSettings(roles_follow=True), other_profiles=tuple(alike)
    )
    assert [node.chunk_tokens for node in options.nodes(load_profile("h200-llama8b"))] == [8192, 512, 512]
    asked = dataclasses.replace(options, chunk_tokens=2048)
    assert {node.chunk_tokens for node in asked.nodes(load_profile("h200-llama8b"))} == {2048}


@pytest.mark.parametrize("policy", [*POLICIES, *RULES])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_once_and_nothing_is_left(policy: str, seed: int) -> None:
    rule = peer_policy(policy) if policy in RULES else None
    check_ends(run(small_trace(seed=seed), "3P2D", policy=policy, rule=rule), 300)


@pytest.mark.parametrize("reject", REJECTING)
def test_every_request_ends_once_under_overload(reject: RejectPolicy) -> None:
    cluster = run(small_trace(), "2P1D", speed=4.0, reject=reject, slo=TIGHT)
    check_ends(cluster, 300)
    assert cluster.outcomes.num_rejected > 0


@pytest.mark.parametrize("reject", REJECTING)
def test_each_request_is_refused_and_judged_by_the_bounds_that_it_names(reject: RejectPolicy) -> None:
    trace = small_trace()
    loose, tight = NamedBounds(inf, inf), NamedBounds(TIGHT.ttft_slo_s / 4)
    rows = [
        row._replace(bounds=(loose, tight, None)[number % 3]) for number, row in enumerate(trace.requests)
    ]
    cluster = run(dataclasses.replace(trace, requests=rows), "2P1D", speed=4.0, reject=reject, slo=TIGHT)
    check_ends(cluster, 300)
    outcomes = cluster.outcomes
    refused = [sum(each.number % 3 == kind for each in outcomes.refused) for kind in range(3)]
    assert refused[0] == 0
    assert 0 < refused[2] < refused[1]
    bounds = [loose.over(TIGHT), tight.over(TIGHT), TIGHT]
    assert bounds[1] == TIGHT._replace(ttft_slo_s=TIGHT.ttft_slo_s / 4)
    rows_of = zip(outcomes.number, outcomes.ttft_s, outcomes.tbt_s, outcomes.mean_tbt_s, strict=True)
    met = [
        (bounds[number % 3].ttft_slo_s >= ttft_s, bounds[number % 3].tbt_slo_s, tbt_s, mean_s)
        for number, ttft_s, tbt_s, mean_s in rows_of
    ]
    in_paper = sum(in_time and tbt_s <= bound_s for in_time, bound_s, tbt_s, _ in met)
    served = sum(in_time and mean_s <= bound_s for in_time, bound_s, _, mean_s in met)
    assert outcomes.share_within(*TIGHT[:2]) == in_paper / 300
    assert outcomes.served_share_within(*TIGHT[:2]) == served / 300


def test_clock_never_goes_back_and_the_view_stays_sound() -> None:
    trace = small_trace()
    options = ClusterOptions(3, 2, trace.block_size, sample_every_s=0.5)
    cluster = WatchedCluster(COST, options)
    cluster.run(arrivals(trace, 2.0, 1, 0.0, None, 0))
    assert len(cluster.samples) > 50


def test_busy_seconds_are_the_prefills_that_were_done() -> None:
    cluster = run(small_trace(), "3P3D")
    assert sum(node.engine.busy_s for node in cluster.nodes) == pytest.approx(sum(cluster.outcomes.prefill_s))


def test_wasted_prefill_is_what_completed_requests_did_not_use() -> None:
    cluster = run(small_trace(), "6P1D", speed=4.0, reject=RejectPolicy.LATE, slo=TIGHT)
    outcomes = cluster.outcomes
    assert outcomes.wasted_prefill_s > 0
    assert sum(node.engine.busy_s for node in cluster.nodes) == pytest.approx(
        sum(outcomes.prefill_s) + outcomes.wasted_prefill_s
    )


def test_no_prefill_node_idles_while_its_queue_has_a_ready_request() -> None:
    rows = [TraceRequest(0.0, 5_120, 2, range(number * 10, number * 10 + 10)) for number in range(6)]
    cluster = run(Trace("burst", 512, rows), "2P1D")
    prefill_s = COST.prefill_s(5_120, 0)
    # three on each node, back to back
    assert max(cluster.outcomes.queue_s) == pytest.approx(2 * prefill_s)


def test_lone_request_takes_what_the_cost_model_says() -> None:
    cluster = run(Trace("one", 512, [TraceRequest(1.0, 5_000, 101, range(10))]), "1P1D")
    (ttft_s,), (tbt_s,) = cluster.outcomes.ttft_s, cluster.outcomes.tbt_s
    latency_s, layers = COST.profile.transfer_fixed_s, COST.profile.num_layers
    expected_s = COST.prefill_s(5_000, 0) + latency_s + (COST.transfer_s(5_000) - latency_s) / layers
    expected_s += COST.profile.dispatch_s
    assert ttft_s == pytest.approx(expected_s, rel=1e-6)
    # its longest tenth: the last ten of 100 steps
    assert tbt_s == pytest.approx(COST.decode_step_s(1, 5_000 + 94.5), rel=1e-6)


def test_what_is_handed_over_has_its_second_token_so_much_later() -> None:
    later = dataclasses.replace(COST.profile, start_s=0.004, join_s=0.001)
    trace = Trace("one", 512, [TraceRequest(0.0, 5_000, 11, range(10))])
    firsts_s, rests_s = [], []
    for profile in (COST.profile, later):
        gaps = GapCounts()
        cluster = simulate(Plan(trace, CostModel(profile), ClusterOptions(1, 1, 512, on_gaps=gaps.add)))
        check_ends(cluster, 1)
        assert gaps.num_gaps == 10
        # the first is the longest
        firsts_s.append(gaps.longest_s)
        rests_s.append(10 * cluster.outcomes.mean_tbt_s[0] - gaps.longest_s)
    assert firsts_s[1] - firsts_s[0] == pytest.approx(0.005, rel=1e-3)
    assert rests_s[1] == pytest.approx(rests_s[0], rel=1e-3)


def test_repeated_prompt_is_found_in_the_cache() -> None:
    rows = [TraceRequest(at, 5_120, 2, range(10)) for at in (0.0, 100.0)]
    cluster = run(Trace("twice", 512, rows), "2P1D")
    assert list(cluster.outcomes.prefix_tokens) == [0, 5_119]
    assert cluster.outcomes.hit_rate_blocks() == 0.5


def test_chunks_that_are_computed_are_found_while_the_rest_of_their_prompt_is_not() -> None:
    first_s = COST.step.with_chunks_s(2_048, 2_048**2, 0, 0) + COST.beside_chunks_s(5_120, 0)
    rows = [TraceRequest(0.0, 5_120, 2, range(10)), TraceRequest(first_s, 5_120, 2, range(10))]
    trace = Trace("twice", 512, rows)
    # the second begins beside the rest of the first, when that has two chunks of three
    shared = run(trace, "1P1D", chunk_tokens=2_048, step_budgets=False)
    assert list(shared.outcomes.prefix_tokens) == [0, 4_096]
    assert list(run(trace, "1P1D").outcomes.prefix_tokens) == [0, 5_119]


def test_a_prompt_that_waits_for_the_rest_of_another_finds_that_too() -> None:
    first_s = COST.step.with_chunks_s(2_048, 2_048**2, 0, 0) + COST.beside_chunks_s(5_120, 0)
    rows = [TraceRequest(0.0, 5_120, 2, range(10)), TraceRequest(first_s, 5_120, 2, range(10))]
    cluster = run(Trace("twice", 512, rows), "1P1D", chunk_tokens=2_048)
    assert list(cluster.outcomes.prefix_tokens) == [0, 5_119]


def test_prompts_share_the_steps_of_a_prefill_node_that_has_chunks() -> None:
    rows = [TraceRequest(at_s, 200, 2, [number]) for number, at_s in enumerate((0.0, 0.001, 0.001))]
    trace = Trace("three", 512, rows)
    ttft_s = run(trace, "1P1D", chunk_tokens=512).outcomes.ttft_s
    # the first was alone in its step, the others had one together
    assert ttft_s[0] < ttft_s[1] == pytest.approx(ttft_s[2], abs=1e-3)
    apart_s = run(trace, "1P1D").outcomes.ttft_s
    assert apart_s[0] < apart_s[1] < apart_s[2] - 0.9 * COST.prefill_s(200, 0)


def test_view_delay_hides_a_prefix_for_as_long() -> None:
    rows = [TraceRequest(at, 5_120, 2, range(10)) for at in (0.0, 5.0, 100.0)]
    trace = Trace("thrice", 512, [TraceRequest(0.0, 100, 2, [99]), *rows])
    seen = run(trace, "2P1D").outcomes.prefix_tokens
    late = run(trace, "2P1D", view_delay_s=30.0).outcomes.prefix_tokens
    assert sum(seen) > sum(late) > 0


def test_cache_that_is_too_small_forgets_the_tail_first() -> None:
    profile = load_profile("a800-llama70b")
    assert profile.host_kv_tokens > 0
    rows = [
        TraceRequest(at * 50.0, 5_120, 2, range(first, first + 10)) for at, first in ((0, 0), (1, 50), (2, 0))
    ]
    small = CostModel(dataclasses.replace(profile, host_kv_tokens=15 * 512))
    cluster = SimCluster(small, ClusterOptions(1, 1, 512))
    cluster.run(iter(rows))
    assert list(cluster.outcomes.prefix_tokens) == [0, 0, 5 * 512]


def test_no_rejection_without_an_slo() -> None:
    cluster = run(small_trace(), "1P4D", speed=4.0, reject=RejectPolicy.PREDICT, slo=Slo())
    assert cluster.outcomes.num_rejected == 0


def test_events_are_few_for_each_request() -> None:
    cluster = run(small_trace(), "4P4D", policy="load")
    assert cluster.num_events <= 6 * 300


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the public trace is not in ../shared/traces")
def test_global_beats_local_beats_load_beats_random_on_the_public_trace() -> None:
    trace = read_trace(SHARED_TRACE)
    part = Trace(trace.name, trace.block_size, trace.requests[:3_000])
    means = []
    for policy in POLICIES:
        outcomes = run(part, "6P10D", policy=policy).outcomes
        means.append(sum(outcomes.ttft_s) / outcomes.num_completed)
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("chunk_tokens", [None, 512])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_whichever_nodes_die(seed: int, chunk_tokens: int | None) -> None:
    rng = random.Random(seed)
    names = [NodeId(name) for name in ("p0", "p1", "p2", "d0", "d1")]
    faults = tuple(NodeFault(rng.random() * 80, rng.choice(names), rng.choice([5.0, 20.0])) for _ in range(8))
    options = {"faults": faults, "reject": RejectPolicy.PREDICT, "slo": TIGHT, "chunk_tokens": chunk_tokens}
    cluster = run(small_trace(seed=seed), "3P2D", **options)
    check_ends(cluster, 300)
    assert cluster.outcomes.num_retried > 0


def test_request_that_lost_its_decode_node_keeps_its_first_token_and_pays_in_gaps() -> None:
    trace = Trace("one", 512, [TraceRequest(0.0, 5_000, 1_000, range(10))])
    calm = run(trace, "1P2D").outcomes
    hurt = run(trace, "1P2D", faults=(NodeFault(10.0, NodeId("d0")),)).outcomes
    assert hurt.num_retried == 1
    assert list(hurt.ttft_s) == list(calm.ttft_s)
    assert hurt.tbt_s[0] > calm.tbt_s[0]


def test_fault_of_an_unknown_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="p9"):
        run(small_trace(10), "1P1D", faults=(NodeFault(1.0, NodeId("p9")),))


FOLLOW = SchedulerSettings(reject=RejectPolicy.NONE, roles_follow=True)


def first_change_s(trace: Trace, nodes: str) -> tuple[float, str]:
    """Return when the first node changes its role, and its name."""
    changed: list[tuple[float, str]] = []

    class Watched(RoleController):
        def step(self, view, now_s, waiting_s=0.0):
            change = super().step(view, now_s, waiting_s)
            if change is not None:
                changed.append((now_s, change.node_id))
            return change

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conductor.replay.cluster.RoleController", Watched)
        run(trace, nodes, settings=FOLLOW)
    return changed[0]


def test_nodes_change_roles_where_one_pool_is_overloaded_and_no_request_is_lost() -> None:
    trace = small_trace(900)
    fixed = run(trace, "2P6D")
    following = run(trace, "2P6D", settings=FOLLOW)
    check_ends(following, 900)
    assert following.outcomes.role_changes >= 1
    assert sum(following.outcomes.ttft_s) < 0.7 * sum(fixed.outcomes.ttft_s)


def test_roles_stay_where_load_is_even() -> None:
    assert run(small_trace(), "12P8D", settings=FOLLOW).outcomes.role_changes == 0


@pytest.mark.parametrize("after_s", [-0.5, 0.0, 0.01, 0.2, 1.0, 5.0])
def test_a_node_that_dies_at_any_moment_of_its_change_costs_no_request(after_s: float) -> None:
    trace = small_trace(900)
    at_s, name = first_change_s(trace, "2P6D")
    for for_s in (3.0, inf):
        fault = NodeFault(at_s + after_s, NodeId(name), for_s)
        hurt = run(trace, "2P6D", settings=FOLLOW, faults=(fault,))
        check_ends(hurt, 900)


def test_next_turn_waits_for_the_answer_and_then_as_long_as_its_user() -> None:
    second = TraceRequest(30.0, 6_000, 11, range(12))
    trace = Trace("session", 512, [TraceRequest(1.0, 5_120, 101, range(10), second)])
    outcomes = run(trace, "1P1D").outcomes
    decode_s = sum(COST.decode_step_s(1, 5_120 + step) for step in range(100))
    assert outcomes.num_completed == 2
    assert outcomes.arrival_s[1] == pytest.approx(1.0 + outcomes.ttft_s[0] + decode_s + 30.0)
    assert outcomes.prefix_tokens[1] == 5_120


def test_pipelined_group_prefills_a_long_prompt_sooner_and_short_ones_no_slower_together() -> None:
    long = Trace("long", 512, [TraceRequest(0.0, 65_536, 2, range(128))])
    alone_s, together_s = (run(long, "4P1D", stages=stages).outcomes.ttft_s[0] for stages in (1, 4))
    assert alone_s / 4 < together_s < alone_s / 2
    check_ends(run(small_trace(), "4P4D", stages=2), 300)


def test_stages_that_do_not_divide_the_prefill_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="--stages"):
        run(small_trace(10), "3P1D", stages=2)


def test_disk_gives_back_what_memory_dropped_for_the_seconds_of_reading_it() -> None:
    rows = [
        TraceRequest(at * 50.0, 5_120, 2, range(first, first + 10)) for at, first in ((0, 0), (1, 50), (2, 0))
    ]
    small = dataclasses.replace(COST.profile, host_kv_tokens=10 * 512)
    disk = dataclasses.replace(small, disk_kv_tokens=100 * 512, disk_bytes_per_s=1e9)
    cluster = SimCluster(CostModel(disk), ClusterOptions(1, 1, 512))
    cluster.run(iter(rows))
    assert list(cluster.outcomes.prefix_tokens) == [0, 0, 5_119]
    # 1.7 GB at 1 GB/s: slower than computing one token, faster than computing all
    assert cluster.outcomes.ttft_s[2] > 5_120 * COST.profile.kv_token_bytes / 1e9


def test_a_session_begins_when_another_has_ended() -> None:
    rows = [
        TraceRequest(0.0, 512, 11, range(at, at + 1), TraceRequest(2.0, 512, 11, range(at, at + 1)))
        for at in range(6)
    ]
    plan = Plan(Trace("loop", 512, rows), COST, ClusterOptions(1, 1, 512), sessions=2)
    outcomes = simulate(plan).outcomes
    assert outcomes.num_arrived == outcomes.num_completed == 12
    arrived = sorted(outcomes.arrival_s)
    assert arrived[:2] == [0.0, 0.0]
    assert arrived[2] > 2.0
    assert len(set(arrived)) == 11


def test_a_subagent_works_beside_its_session_and_begins_no_other() -> None:
    fork = TraceRequest(1.0, 512, 11, [7])
    first = TraceRequest(0.0, 512, 11, [1], TraceRequest(9.0, 512, 11, [1]), (fork,))
    trace = Trace("forks", 512, [first, TraceRequest(0.0, 512, 11, [8])])
    outcomes = simulate(Plan(trace, COST, ClusterOptions(1, 1, 512), sessions=1)).outcomes
    ends = sorted(outcomes.arrival_s)
    assert len(ends) == 4
    assert 1.0 < ends[1] < 9.0 < ends[2] < ends[3], "the fork, the next turn, and then the next session"


def test_decode_nodes_that_keep_prompts_receive_less_of_the_next_turn() -> None:
    rows = [TraceRequest(0.0, 5_120, 2, range(10)), TraceRequest(50.0, 10_240, 2, range(20))]
    without, kept = (
        run(Trace("turns", 512, rows), "1P1D", decode_caches=keeps).links.bytes_moved
        for keeps in (False, True)
    )
    assert without - kept == pytest.approx(5_120 * COST.profile.kv_token_bytes)


@pytest.mark.parametrize("reject", RejectPolicy)
def test_requests_that_end_with_their_prompts_take_no_decode_node(reject: RejectPolicy) -> None:
    trace = small_trace()
    rows = [row._replace(output_tokens=0) if at % 3 else row for at, row in enumerate(trace.requests)]
    cluster = run(dataclasses.replace(trace, requests=rows), "3P2D", reject=reject)
    check_ends(cluster, 300)
    outcomes = cluster.outcomes
    alone = [at for at, tokens in enumerate(outcomes.output_tokens) if not tokens]
    assert len(alone) > 100
    assert all(outcomes.prefill_node[at] == outcomes.decode_node[at] for at in alone)
    assert all(outcomes.tbt_s[at] == 0.0 for at in alone)


def twice(trace: Trace, apart_s: float) -> Trace:
    later = [row._replace(arrival_s=row.arrival_s + apart_s) for row in trace.requests]
    return dataclasses.replace(trace, requests=[*trace.requests, *later])


def test_thirty_years_in_which_nothing_comes_take_few_events() -> None:
    settings = SchedulerSettings(roles_follow=True)
    once = run(small_trace(), "1P3D", settings=settings)
    cluster = run(twice(small_trace(), 1e9), "1P3D", settings=settings)
    check_ends(cluster, 600)
    assert cluster.num_events < 3 * once.num_events


def test_thirty_years_between_two_turns_take_few_events() -> None:
    trace = small_trace()
    turns = [row._replace(next_turn=row._replace(arrival_s=1e9)) for row in trace.requests]
    settings = SchedulerSettings(roles_follow=True)
    once = run(trace, "1P3D", settings=settings)
    cluster = run(dataclasses.replace(trace, requests=turns), "1P3D", settings=settings)
    check_ends(cluster, 600)
    assert cluster.num_events < 3 * once.num_events


def test_looks_that_are_left_out_while_nothing_goes_on_change_nothing(monkeypatch) -> None:
    trace, settings = twice(small_trace(rate=8.0), 600.0), SchedulerSettings(roles_follow=True)
    fewer = run(trace, "1P4D", settings=settings)
    monkeypatch.setattr("conductor.replay.cluster.FORGOTTEN_S", inf)
    every = run(trace, "1P4D", settings=settings)
    assert fewer.num_events < every.num_events
    assert fewer.outcomes.role_changes == every.outcomes.role_changes > 0
    assert fewer.outcomes.ttft_s == every.outcomes.ttft_s
    assert fewer.outcomes.mean_tbt_s == every.outcomes.mean_tbt_s
