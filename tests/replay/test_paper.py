"""The papers' experiments: what they measure is what they say, on runs whose answer is known."""

import pytest

from conductor.profile import load_profile
from conductor.replay.generate import generate
from conductor.replay.outcome import Outcomes
from conductor.replay.paper import correlation, deviation, halves, highest_rate

PROFILE = load_profile("a800-llama70b")


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


def test_half_of_each_prompt_is_one_of_a_few() -> None:
    trace = halves(8_192, 1.0)
    first = {request.chain[:8] for request in trace.requests}
    own = [block for request in trace.requests for block in request.chain[8:]]
    assert len(first) == 4
    assert len(own) == len(set(own)) == 8 * len(trace.requests)
    assert {len(request.chain) * 512 for request in trace.requests} == {8_192}


def test_correlation_and_deviation_of_known_series() -> None:
    rising, falling = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    assert correlation(rising, falling) == pytest.approx(-1.0)
    assert correlation(rising, [5.0, 5.0, 5.0]) == 0.0
    assert deviation(rising) == pytest.approx((2 / 3) ** 0.5)


def test_bursts_are_bursts_and_the_mean_rate_stays() -> None:
    def spread(burstiness: float) -> float:
        trace = generate("conversation", 600, 3.0, 0, burstiness)
        assert len(trace.requests) / trace.span_s == pytest.approx(3.0, rel=0.05)
        gaps = [
            later.arrival_s - sooner.arrival_s
            for sooner, later in zip(trace.requests, trace.requests[1:], strict=False)
        ]
        return deviation(gaps)

    assert spread(0.1) > 1.3 * spread(1.0)
