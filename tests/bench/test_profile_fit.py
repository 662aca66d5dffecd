"""A fit finds the costs that made the points, and says how far it is off where it was not asked."""

import dataclasses
import random
from functools import partial

import pytest

from bench.profile_fit import LEAST_S, Measured, fit_decode, fit_prefill, fitted
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Evidence
from conductor.profiles.reader import load_profile


def grid(cost, noise: float, seed: int) -> list[Measured]:
    rng = random.Random(seed)
    return [
        Measured(tokens, context, cost(tokens, context) * (1 + rng.uniform(-noise, noise)))
        for tokens in (1, 16, 128, 1024, 8192)
        for context in (64, 1024, 16_384)
    ]


def test_a_fit_finds_the_coefficients_that_made_the_points() -> None:
    found, share = fit_decode(grid(lambda batch, context: 5e-3 + 2e-5 * batch + 3e-8 * batch * context, 0, 0))
    assert share == 0.0
    assert found.coefficients == pytest.approx((5e-3, 2e-5, 3e-8, 0.0), rel=1e-6)
    assert found.mean_error < 1e-6
    found, small = fit_prefill(
        grid(
            lambda new, prefix: 2e-5 * new + 4e-10 * new * (new + 2 * prefix) + 0.01 * 128 / (new + 128), 0, 0
        )
    )
    assert small == 128
    assert found.coefficients == pytest.approx((0.0, 2e-5, 4e-10, 0.01), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("share", [1 / 32, 1 / 16, 3 / 32, 1 / 4])
def test_the_experts_that_few_tokens_hit_are_found_in_the_steps_of_several_batches(share) -> None:
    def step_s(batch, context):
        return 3e-3 + 2e-5 * batch + 3e-8 * batch * context + 0.014 * (1 - (1 - share) ** batch)

    make = partial(dataclasses.replace, load_profile("cpu-smollm2"))
    prefill = grid(lambda new, prefix: 2e-5 * new, 0, 0)
    found = fitted(make, prefill, grid(step_s, 0.02, 1), Evidence(device="none"))
    assert found.expert_share == share
    assert found.decode_experts_s == pytest.approx(0.014, rel=0.2)
    for batch in (1, 3, 8, 64):
        expected_s = step_s(batch, 1_000)
        assert CostModel(found).decode_step_s(batch, batch * 1_000) == pytest.approx(expected_s, rel=0.05)
        assert CostModel(found).step.decode_step_s(batch, batch * 1_000) == pytest.approx(
            expected_s, rel=0.05
        )


def test_no_coefficient_is_under_zero_and_the_error_of_noise_is_that_of_the_noise() -> None:
    for seed in range(20):
        found, share = fit_decode(grid(lambda batch, context: 5e-3 + 3e-8 * batch * context, 0.05, seed))
        assert share == 0.0, "noise looks like no experts"
        assert min(found.coefficients) >= 0
        assert 0.005 < found.mean_error < 0.08


def test_what_noise_leaves_no_seconds_for_is_as_little_as_a_profile_may_have() -> None:
    make = partial(dataclasses.replace, load_profile("cpu-smollm2"))
    prefill = grid(lambda new, prefix: 0.01, 0, 0)
    decode = grid(lambda batch, context: 2e-5 * batch, 0, 0)
    found = fitted(make, prefill, decode, Evidence(device="none"))
    assert found.prefill_token_s == found.decode_fixed_s == LEAST_S
    assert found.prefill_fixed_s == pytest.approx(0.01)
    assert found.decode_sequence_s == pytest.approx(2e-5)
