"""Goodput is found where enough requests are in time, and one unlucky rate is not believed."""

import pytest

from bench.gap_counts import GapCounts
from bench.shapes import parse_shape
from bench.step_budgets import ENOUGH, UNCLEAR, Found, chats, cost_of, found_in, goodput, run, steady

TIMES = (0.1, 0.2, 0.3)


def falling(at, unlucky=()):
    """Shares that fall at a rate, with some rates where they fall for a moment."""

    def serve(rate):
        share = 1.0 - 0.1 * (rate / at) ** 4
        share -= 0.04 * any(abs(rate / one - 1.0) < 0.002 for one in unlucky)
        return Found(share, TIMES, TIMES)

    return serve


@pytest.mark.parametrize("at", [0.3, 1.0, 7.0])
def test_goodput_is_the_rate_at_which_the_share_falls_below_enough(at):
    rate, found = goodput(falling(at), 1.0)
    assert rate == pytest.approx(at, rel=0.03)
    assert found.share >= ENOUGH


def test_a_rate_at_which_a_few_requests_are_unlucky_is_not_the_limit():
    serve = falling(2.0, unlucky=(1.875,))  # where halving comes by
    assert serve(1.875).share < ENOUGH < steady(serve, 1.875).share
    assert goodput(serve, 1.0)[0] == pytest.approx(2.0, rel=0.03)
    assert steady(serve, 1.0) == serve(1.0), "it is clear"
    assert serve(1.0).share > ENOUGH + UNCLEAR


def test_chats_have_their_first_tokens_when_live_nodes_gave_them():
    """56 ms in the median, 136 and 211 of 90 and 99 of 100: bench/results/step_budgets_h200_chat.json."""
    outcomes = run(parse_shape("1p1d"), chats(25.0)(0.83), cost_of("h200-llama8b"), 0.015)
    median_s, p90_s, p99_s = found_in(outcomes, GapCounts(), 0.015).ttft_s
    assert (median_s, p90_s, p99_s) == (
        pytest.approx(0.056, rel=0.1),
        pytest.approx(0.136, rel=0.1),
        pytest.approx(0.211, rel=0.15),
    )
