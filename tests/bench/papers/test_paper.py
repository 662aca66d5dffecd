"""The papers' experiments: what they measure is what they say, on runs whose answer is known."""

import math
from dataclasses import replace
from random import Random
from statistics import StatisticsError, pstdev

import pytest

from base.request import Slo
from bench.papers.generate import generate
from bench.papers.paper import correlation, halves, highest_rate, loads, swing
from bench.papers.published import known_trace
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.outcome import Outcomes
from conductor.replay.sim_request import SimRequest
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace, TraceRequest

# the paper's nodes with something that each request takes of one beside its prompt: short prompts swing most
PROFILE = replace(load_profile("a800-llama70b"), prefill_fixed_s=0.38)


def answering(ttft_s: float, tbt_s: float) -> Outcomes:
    outcomes = Outcomes(512)
    outcomes.ttft_s.extend([ttft_s] * 10)
    outcomes.tbt_s.extend([tbt_s] * 10)
    return outcomes


@pytest.mark.parametrize(("worse_ttft", "worse_tbt"), [(11.0, 1.0), (1.0, 6.0)])
def test_highest_rate_is_the_last_before_either_bound_breaks(worse_ttft, worse_tbt) -> None:
    def run(rate: float) -> Outcomes:
        return answering(worse_ttft, 0.03 * worse_tbt) if rate > 1.0 else answering(1.0, 0.03)

    assert 1.0 / 1.125 < highest_rate(run) <= 1.0


def test_a_refused_request_has_waited_for_ever() -> None:
    refusing = answering(0.5, 0.03)
    for number in range(3):
        refusing.rejected(SimRequest(TraceRequest(0.0, 512, 8, [1]), number), "ttft", 0.0)
    assert highest_rate(lambda rate: refusing if rate > 1.0 else answering(1.0, 0.03)) <= 1.0


def test_a_trace_is_known_by_its_size_or_by_what_it_imitates() -> None:
    assert known_trace(generate("synthetic", 20, 3.0, 0)) == "synthetic"
    rows = [TraceRequest(3_537.0 * at / 12_030, 512, 8, [at]) for at in range(12_031)]
    assert known_trace(Trace("renamed.jsonl", 512, rows)) == "conversation"
    assert known_trace(Trace("conversation_trace.jsonl", 512, rows[:100])) is None


def test_half_of_each_prompt_is_one_of_a_few() -> None:
    trace = halves(8_192, 1.0)
    first = {request.chain[:8] for request in trace.requests}
    own = [block for request in trace.requests for block in request.chain[8:]]
    assert len(first) == 4
    assert len(own) == len(set(own)) == 8 * len(trace.requests)
    assert {len(request.chain) * 512 for request in trace.requests} == {8_192}


def test_correlation_of_known_series() -> None:
    rising, falling = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    assert correlation(rising, falling) == pytest.approx(-1.0)
    assert correlation(rising, [5.0, 5.0, 5.0]) == 0.0
    with pytest.raises(StatisticsError):
        correlation(rising, [*rising, 4.0])


def test_bursts_are_bursts_and_the_mean_rate_stays() -> None:
    def spread(burstiness: float) -> float:
        trace = generate("conversation", 600, 3.0, 0, burstiness)
        assert len(trace.requests) / trace.span_s == pytest.approx(3.0, rel=0.05)
        gaps = [
            later.arrival_s - sooner.arrival_s
            for sooner, later in zip(trace.requests, trace.requests[1:], strict=False)
        ]
        return pstdev(gaps)

    assert spread(0.1) > 1.3 * spread(1.0)


def overloaded(reject: RejectPolicy, retests: bool) -> tuple[list[float], list[float]]:
    """Return the load of both pools, at three times what eight prefill nodes and one for decoding bear."""
    rng, now_s, rows = Random(0), 0.0, []
    for number in range(3_000):
        now_s += rng.expovariate(12.0)
        rows.append(TraceRequest(now_s, 8_192, 300, range(16 * number, 16 * number + 16)))
    options = ClusterOptions(
        8,
        1,
        512,
        settings=SchedulerSettings(reject=reject),
        retests=retests,
        slo=Slo(30.0, 0.0554),  # steps of 51 ms are admitted
        sample_every_s=1.0,
    )
    return loads(simulate(Plan(Trace("even", 512, rows), CostModel(PROFILE), options)))


def test_loads_swing_in_anti_phase_where_the_present_one_decides_and_not_where_the_predicted_one_does() -> (
    None
):
    early_queue_s, early_step_s = overloaded(RejectPolicy.EARLY, retests=False)
    queue_s, step_s = overloaded(RejectPolicy.PREDICT, retests=False)
    period, height = swing([early_step_s])
    assert 20 < period < 50
    assert height > 0.7
    assert correlation(early_queue_s, early_step_s) < -0.3
    assert swing([step_s])[1] < 0.3
    assert pstdev(step_s) < 0.2 * pstdev(early_step_s)
    assert pstdev(queue_s) < 0.3 * pstdev(early_queue_s)


def test_second_test_at_the_decode_node_takes_the_swing_away() -> None:
    once, twice = (overloaded(RejectPolicy.EARLY, retests=retests)[1] for retests in (False, True))
    assert pstdev(twice) < 0.2 * pstdev(once)


def test_swing_of_a_wave_is_its_period_and_of_noise_none() -> None:
    rng = Random(0)
    wave = [math.sin(2 * math.pi * at / 40) for at in range(600)]
    assert swing([wave])[0] in (40, 80)
    assert swing([wave])[1] == pytest.approx(1.0, abs=0.05)
    assert swing([[rng.random() for _ in range(600)] for _ in range(3)])[1] < 0.15
