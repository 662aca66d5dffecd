"""Budgets of steps: what prompts may take beside those who decode."""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.errors import ProtocolError
from base.step_budget import (
    KEPT_MEAN,
    STARVED_STEPS,
    TARGET_GAP_S,
    WORTHWHILE,
    BudgetedStep,
    DecodeLoad,
    is_lost,
    target_gap_s,
)
from base.step_cost import RATIO_LIMITS, StepCorrection, StepCost

COST = StepCost(
    prefill_token_s=2e-5,
    prefill_token2_s=5e-10,
    decode_fixed_s=0.004,
    decode_sequence_s=1e-5,
    decode_context_token_s=3e-8,
    chunk_step_s=0.002,
    mixed_step_s=0.0005,
    chunk_sequence_s=1e-5,
    chunk_token2_s=6e-10,
    attention_rows=128,
    long_chunk_tokens=1024,
    step_tokens=(128, 256, 512, 768, 1024, 2048),
)
BATCH = 8
CONTEXT = 16_000
EMPTY_S = COST.decode_step_s(BATCH, CONTEXT)


def load_of(mean_left_s: float = inf, longest_left_s: float = inf, mean_s: float = 0.02) -> DecodeLoad:
    return DecodeLoad(BATCH, CONTEXT, mean_left_s, longest_left_s, KEPT_MEAN * mean_s - EMPTY_S)


def seconds_of(tokens: int, prefix: int = 0) -> float:
    return COST.with_chunks_s(tokens, tokens * (tokens + 2 * prefix), BATCH, CONTEXT)


def test_where_nobody_decodes_a_step_takes_what_memory_allows() -> None:
    step = BudgetedStep(8192, COST)
    assert step.take(10_000, 0) == 8192
    assert step.is_full
    assert not step.has_passed


@given(
    st.floats(0.0, 0.4),
    st.one_of(st.just(inf), st.floats(0.0, 0.4)),
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 30_000)), min_size=1, max_size=4),
    st.floats(0.5, 3.0),
)
def test_a_step_ends_when_the_first_token_is_due(
    mean_left_s: float, longest_left_s: float, prompts: list[tuple[int, int]], ratio: float
) -> None:
    load = load_of(mean_left_s, longest_left_s)
    step = BudgetedStep(8192, COST, load, 0, ratio)
    taken = [step.take(wanted, prefix) for wanted, prefix in prompts]
    attended = sum(tokens * (tokens + 2 * prefix) for tokens, (_, prefix) in zip(taken, prompts, strict=True))
    assert all(tokens <= wanted for tokens, (wanted, _) in zip(taken, prompts, strict=True))
    assert sum(taken) == 8192 - step.tokens_left <= 8192
    if any(taken):
        seconds = COST.with_chunks_s(sum(taken), attended, BATCH, CONTEXT)
        assert seconds * ratio <= min(mean_left_s, longest_left_s) + 1e-12
        assert not step.has_passed
    else:
        assert step.has_passed


def test_a_chunk_is_as_long_as_the_first_due_moment_lets_it_be() -> None:
    tokens = BudgetedStep(8192, COST, load_of(0.05)).take(8000, 0)
    assert seconds_of(tokens) <= 0.05 < seconds_of(tokens + 128)


def test_less_than_is_worth_a_step_waits_until_so_much_is_saved() -> None:
    saving_s = KEPT_MEAN * 0.008 - EMPTY_S
    num_starved, tokens = 0, 0
    while not tokens:
        step = BudgetedStep(8192, COST, load_of(0.009 + saving_s * num_starved, mean_s=0.008), num_starved)
        tokens = step.take(8000, 0)
        num_starved += step.has_passed
    assert 1 < num_starved < STARVED_STEPS
    assert tokens >= WORTHWHILE * COST.chunk_part_s(BATCH) / COST.prefill_token_s - 1


def test_where_a_chunk_costs_nothing_but_its_tokens_only_the_first_token_is_saved_for() -> None:
    cost = replace(COST, chunk_step_s=0.0, mixed_step_s=0.0, step_tokens=())
    late_s, saving_s = -0.03, KEPT_MEAN * 0.02 - EMPTY_S
    one_token_s = cost.with_chunks_s(1, 1.0, BATCH, CONTEXT)
    needed = -(-(one_token_s - late_s) // saving_s)
    num_starved = 0
    while True:
        load = DecodeLoad(BATCH, CONTEXT, late_s + num_starved * saving_s, inf, saving_s)
        step = BudgetedStep(8192, cost, load, num_starved)
        if step.take(2_000, 0):
            break
        num_starved += step.has_passed
    assert num_starved == needed < STARVED_STEPS


def test_what_is_left_of_a_prompt_is_worth_a_step_however_short() -> None:
    assert BudgetedStep(8192, COST, load_of(0.012, mean_s=0.008)).take(5, 3000) == 5


def test_a_bound_on_the_longest_gap_does_not_wait_for_what_never_comes() -> None:
    tokens = BudgetedStep(8192, COST, load_of(longest_left_s=0.011)).take(8000, 0)
    assert 0 < tokens < WORTHWHILE * COST.chunk_part_s(BATCH) / COST.prefill_token_s


@pytest.mark.parametrize("load", [load_of(-1.0), load_of(longest_left_s=0.001), load_of(0.0, 0.0)])
def test_prompts_that_were_passed_over_for_long_get_a_chunk(load: DecodeLoad) -> None:
    num_starved = 0
    while num_starved < STARVED_STEPS:
        step = BudgetedStep(8192, COST, load, num_starved)
        assert step.take(8000, 0) == 0
        num_starved += step.has_passed
    assert num_starved == STARVED_STEPS
    tokens = BudgetedStep(8192, COST, load, num_starved).take(8000, 0)
    assert tokens == pytest.approx(WORTHWHILE * COST.chunk_part_s(BATCH) / COST.prefill_token_s, abs=1)


def test_costs_at_the_edge_of_numbers_end_no_scheduler() -> None:
    cost = replace(COST, prefill_token_s=5e-324, prefill_token2_s=0.0, chunk_token2_s=0.0)
    cost.check()
    for load in (load_of(-1e300), load_of(1e-300, 1e-300, 5e-324), load_of(0.0, inf, 1e300)):
        assert 0 <= BudgetedStep(8192, cost, load).take(8000, 1 << 40) <= 8000


def prompts_in_a_step(tokens: int, num_prompts: int, cost: StepCost = COST) -> int:
    step = BudgetedStep(1 << 20, cost, num_prompts=num_prompts)
    return sum(step.take(tokens, 0) == tokens for _ in range(num_prompts))


def test_a_long_prompt_waits_for_no_other_and_short_ones_are_one_step() -> None:
    assert prompts_in_a_step(2048, 2) == 1
    assert prompts_in_a_step(64, 2) == 2, "together they are padded to the length that one is"
    # a step saved is worth a wait to as many as come later
    assert 1 < prompts_in_a_step(2048, 12) < prompts_in_a_step(2048, 48) < 48


def test_nobody_overtakes_a_prompt_for_which_the_step_would_be_too_long() -> None:
    step = BudgetedStep(8192, COST, num_prompts=3)
    assert (step.take(2048, 0), step.take(2048, 0), step.take(64, 0)) == (2048, 0, 0)
    assert step.is_full
    assert not step.has_passed, "somebody had something"


def test_prompts_of_which_most_is_cached_are_one_step() -> None:
    step = BudgetedStep(8192, COST, num_prompts=3)
    assert [step.take(40, 10_000) for _ in range(3)] == [40, 40, 40]


@pytest.mark.parametrize("tokens", [1, 64, 700, 2048, 8000])
def test_where_a_step_costs_nothing_but_its_tokens_nobody_waits_for_another(tokens: int) -> None:
    cost = replace(COST, chunk_step_s=0.0, mixed_step_s=0.0, step_tokens=(), decode_fixed_s=1e-9)
    assert prompts_in_a_step(tokens, 50, cost) == 1


def test_nobody_overtakes_a_prompt_that_was_cut_short() -> None:
    step = BudgetedStep(8192, COST, load_of(0.05, 0.05))
    assert 0 < step.take(8000, 4000) < 8000
    assert step.take(10, 0) == 0


def test_a_scored_prompt_takes_more_room_than_it_has_tokens() -> None:
    step = BudgetedStep(1024)
    assert step.take(5000, 0, weight=4) == 256
    assert step.is_full


@given(st.floats(1e-4, 1.0), st.integers(1, 4000), st.floats(-5.0, 5.0), st.floats(1e-4, 1.0))
def test_a_bound_is_lost_where_steps_without_prompts_would_not_keep_it(
    mean_s: float, gaps_left: int, left_s: float, empty_s: float
) -> None:
    # each step from now on ends `empty_s` later, and is due KEPT_MEAN x bound after the one before
    last_due_s = left_s + KEPT_MEAN * mean_s * (gaps_left - 1)
    assert is_lost(left_s, gaps_left, mean_s, empty_s) == (gaps_left * empty_s > last_due_s)


def line_s(tokens: int, cost: StepCost | None) -> float:
    """Return the seconds in which 200 such prompts are computed, of which steps take what `cost` allows."""
    line, seconds = [tokens] * 200, 0.0
    while line:
        step = BudgetedStep(8192, cost, num_prompts=len(line))
        taken = [step.take(left, tokens - left) for left in line]
        attended = sum(took * (took + 2.0 * (tokens - left)) for took, left in zip(taken, line, strict=True))
        seconds += COST.with_chunks_s(sum(taken), attended, 0, 0)
        line = [left - took for took, left in zip(taken, line, strict=True) if took < left]
    return seconds


@pytest.mark.parametrize("tokens", [64, 128, 200, 256, 400, 700, 1024])
def test_a_long_line_of_prompts_is_served_about_as_fast_as_in_full_steps(tokens: int) -> None:
    assert line_s(tokens, COST) < 1.05 * line_s(tokens, None)


def test_who_names_no_bound_has_a_target_that_leaves_prompts_half_of_a_slow_machine() -> None:
    assert target_gap_s(0.006) == TARGET_GAP_S
    assert target_gap_s(0.2) == 0.4


@pytest.mark.parametrize(
    "change",
    [
        {"prefill_token_s": nan},
        {"prefill_token_s": 0.0},
        {"decode_fixed_s": -1.0},
        {"chunk_step_s": inf},
        {"attention_rows": 0},
        {"step_tokens": (128, 128)},
        {"step_tokens": tuple(range(1, 1000))},
    ],
    ids=str,
)
def test_costs_that_no_step_has_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(change))):
        replace(COST, **change).check()


def test_a_machine_of_another_speed_is_learned_for_each_kind_of_step() -> None:
    correction = StepCorrection()
    assert correction.ratio(True) == 1.0
    correction.observe(False, 0.01, 0.013)
    assert correction.ratio(True) == correction.ratio(False) == pytest.approx(1.3)
    for _ in range(100):
        correction.observe(True, 0.01, 0.04)
    assert correction.ratio(True) == pytest.approx(4.0, rel=0.01)
    assert correction.ratio(False) == pytest.approx(1.3)


@pytest.mark.parametrize("measured_s", [0.0, -1.0, 1e-9, 3600.0])
def test_one_strange_step_changes_little(measured_s: float) -> None:
    correction = StepCorrection()
    for _ in range(50):
        correction.observe(True, 0.01, 0.01)
    correction.observe(True, 0.01, measured_s)
    assert 0.9 < correction.ratio(True) < 1.1
    low, high = RATIO_LIMITS
    for _ in range(1000):
        correction.observe(True, 0.01, measured_s)
    assert low * 0.99 <= correction.ratio(True) <= high * 1.01
