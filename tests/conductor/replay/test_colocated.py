"""The colocated baseline."""

import random
from dataclasses import replace

import pytest

from base.request import Slo
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions, default_chunk_tokens
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest
from tests.conductor.replay.builders import small_trace

COST = CostModel(load_profile("a800-llama70b"))


def run(trace: Trace, nodes: int = 4, speed: float = 1.0, **options):
    return simulate(Plan(trace, COST, ClusterOptions(nodes, 0, 512, **options), speed))


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once(seed: int) -> None:
    outcomes = run(small_trace(seed=seed)).outcomes
    assert outcomes.num_arrived == outcomes.num_completed == 300


def test_lone_request_is_prefilled_as_fast_as_anywhere() -> None:
    cluster = run(Trace("one", 512, [TraceRequest(0.0, 5_000, 50, range(10))]), 2)
    assert list(cluster.outcomes.ttft_s) == [
        pytest.approx(COST.prefill_s(5_000, 0) + COST.profile.dispatch_s)
    ]


def test_prompt_of_another_slows_down_those_who_decode() -> None:
    decoding = TraceRequest(0.0, 600, 400, range(2))
    alone = run(Trace("one", 512, [decoding]), 2).outcomes.tbt_s
    others = [TraceRequest(2.0 + at, 20_000, 2, range(50 + 50 * at, 90 + 50 * at)) for at in range(6)]
    trace = Trace("many", 512, [decoding, *others])
    whole = run(trace, 2, step_budgets=False).outcomes.tbt_s
    chunks = 20_000 / default_chunk_tokens(COST.profile)
    assert max(whole) > alone[0] + 0.5 * COST.prefill_s(20_000, 0) / chunks
    # who names no bound waits for twice a step without prompts at most
    budgeted = run(trace, 2).outcomes.tbt_s
    assert 1.5 * alone[0] < max(budgeted) < 2.1 * alone[0] < max(whole)


def test_who_would_miss_its_bound_is_refused_where_that_is_asked_for() -> None:
    trace = small_trace()
    slo, bounds = Slo(ttft_slo_s=8.0), ClusterOptions(4, 0, 512)
    kept = simulate(Plan(trace, COST, bounds, 2.0)).outcomes
    refused = simulate(
        Plan(trace, COST, replace(bounds, slo=slo, settings=SchedulerSettings()), 2.0)
    ).outcomes
    assert kept.num_completed == 300 > refused.num_completed > 150
    assert refused.num_arrived == 300
    assert max(kept.ttft_s) > 2 * max(refused.ttft_s)


@pytest.mark.parametrize("seed", range(3))
def test_looser_bounds_on_gaps_leave_first_tokens_in_time_where_a_chunk_ends_before_them(seed: int) -> None:
    # a step of 512 tokens ends long before 120 ms, and those who decode have as much of it as ever
    cost, rng, at_s = CostModel(load_profile("h200-llama8b").without_store()), random.Random(seed), 0.0
    rows: list[TraceRequest] = []
    while (at_s := at_s + rng.expovariate(7.5)) < 30.0:
        first = len(rows) * 128
        rows.append(TraceRequest(at_s, 8_192, 256, range(first, first + 128)))
    settings = SchedulerSettings(ahead_s=0.5, ttft_headroom=0.85, roles_follow=True)
    options = ClusterOptions(1, 1, 64, settings=settings, learns=True, decode_caches=True)

    def share(bound_s: float) -> float:
        plan = Plan(Trace("load", 64, rows), cost, replace(options, slo=Slo(2.0, bound_s)))
        return simulate(plan).outcomes.served_share_within(2.0, bound_s)

    assert share(0.12) >= share(0.03) > 0.6


@pytest.mark.parametrize("seed", range(3))
def test_past_capacity_who_is_served_is_served_in_time_beside_those_who_decode(seed: int) -> None:
    # prompts have a third of each step: predicted without that, a line looks a third as long as it is
    cost, rng, at_s = CostModel(load_profile("h200-llama8b").without_store()), random.Random(seed), 0.0
    rows: list[TraceRequest] = []
    while (at_s := at_s + rng.expovariate(2.0)) < 80.0:
        first = len(rows) * 128
        rows.append(TraceRequest(at_s, 8_192, 256, range(first, first + 128)))
    settings, slo = SchedulerSettings(ahead_s=0.5), Slo(2.0, 0.008)
    options = ClusterOptions(1, 0, 64, settings=settings, learns=True, slo=slo)
    outcomes = simulate(Plan(Trace("load", 64, rows), cost, options)).outcomes
    assert outcomes.num_arrived == len(rows) > outcomes.num_completed
    assert max(outcomes.ttft_s) < 1.25 * slo.ttft_slo_s
    assert outcomes.served_share_within(*slo[:2]) > 0.6
