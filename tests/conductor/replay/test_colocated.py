"""The colocated baseline, and the advice that compares with it."""

from dataclasses import replace

import pytest

from base.request import Slo
from bench.papers.advise import advice, drawn, fewest, main, pareto, ranked, splits, tied
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profile_file import load_profile
from conductor.replay.cluster_options import DEFAULT_CHUNK_TOKENS, ClusterOptions
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest, write_trace
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
    assert max(whole) > alone[0] + 0.5 * COST.prefill_s(20_000, 0) / (20_000 / DEFAULT_CHUNK_TOKENS)
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


def test_all_splits_and_colocation_are_tried() -> None:
    assert [each.nodes for each in splits(3)] == ["3C", "1P2D", "2P1D"]
    assert [each.threshold for each in splits(2, thresholds=(1.5, 4.0))] == [None, None, 1.5, 4.0]
    assert [each.chunk_tokens for each in splits(2, chunks=(256, 512))] == [256, 512, 256, 512]


def test_groups_of_prefill_nodes_are_tried_where_they_come_out_even() -> None:
    assert [each[:2] for each in splits(4, 3) if each[1] > 1] == [("2P2D", 2), ("3P1D", 3)]


def test_best_has_the_largest_capacity_then_the_shortest_ttft() -> None:
    def measured(capacity, ttft, tbt):
        return {"effective_capacity": capacity, "ttft_s": {"mean": ttft}, "tbt_s": {"p99": tbt}}

    runs = [measured(0.9, 1.0, 0.1), measured(1.0, 3.0, 0.05), measured(1.0, 2.0, 0.2)]
    assert ranked(runs) == [runs[2], runs[1], runs[0]]
    assert pareto(runs) == [runs[0], runs[1]]


def report(prefill: int, capacity: float, requests: int = 1_000) -> dict[str, object]:
    return {
        "prefill_nodes": prefill,
        "decode_nodes": 8 - prefill,
        "stages": 1,
        "threshold": None,
        "chunk_tokens": None,
        "requests": requests,
        "effective_capacity": capacity,
        "effective_tokens": capacity,
        "ttft_s": {"mean": 1.0 + prefill},
        "tbt_s": {"p99": 0.1 / prefill},
    }


def test_splits_that_so_many_requests_cannot_tell_apart_are_tied() -> None:
    runs = [report(3, 0.900), report(4, 0.895), report(5, 0.880)]
    assert tied(runs) == [runs[1]]
    assert tied([report(3, 0.900, 10**6), report(4, 0.895, 10**6)]) == []
    assert "tied with it, as far as 1000 requests can tell: 4P4D\n" in advice(runs)


def test_a_best_split_that_serves_less_than_half_is_warned_of() -> None:
    assert "warning: even that serves 31%" in advice([report(3, 0.31), report(4, 0.2)])
    assert "warning" not in advice([report(3, 0.6)])


def test_the_fewest_nodes_that_serve_a_share_are_found() -> None:
    asked = []

    def best_of(num_nodes: int):
        asked.append(num_nodes)
        return report(num_nodes, min(1.0, num_nodes / 20))

    found = fewest(32, 0.5, best_of)
    assert found is not None
    assert found[0] == found[1]["prefill_nodes"] == 10
    assert len(asked) <= 7
    assert fewest(9, 0.5, best_of) is None


def test_splits_are_drawn_with_what_is_said_of_them() -> None:
    text = drawn("t", [report(3, 0.31), report(4, 0.2)])
    assert text.count("<svg") == 4
    assert "warning: even that serves 31%" in text


def test_advice_names_a_split(tmp_path, capsys) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(60, rate=1.0), file)
    assert main([str(file), "--gpus", "3", "--jobs", "1", "--slo-tbt", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "best: " in out
    assert out.count("global") == 3


def test_threshold_that_is_tried_is_named(tmp_path, capsys) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(40), file)
    assert main([str(file), "--gpus", "2", "--jobs", "1", "--thresholds", "2"]) == 0
    assert "1P1D with threshold 2" in capsys.readouterr().out


def test_wrong_option_is_reported_once(tmp_path, capsys) -> None:
    file = tmp_path / "t.jsonl"
    write_trace(small_trace(10), file)
    assert main([str(file), "--gpus", "2", "--jobs", "1", "--sped", "2"]) == 2
    assert "--sped" in capsys.readouterr().err
