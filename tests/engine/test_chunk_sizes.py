"""Chunks of a pipeline: the first as long as is wanted, the others as long as takes as long."""

from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.chunk_sizes import MIN_STEPS, STEP_SHARE, chunk_limit
from engine.scheduler import Scheduler
from tests.engine.builders import make_sequence


def cost(start: int, count: int, attention: float) -> float:
    return count + attention * ((start + count) ** 2 - start**2)


@given(st.integers(1, 10**6), st.integers(16, 16384), st.floats(1e-7, 1e-2), st.sampled_from([16, 64]))
def test_a_later_chunk_costs_what_the_first_does_but_for_half_a_step(
    start, chunk_tokens, attention, block_size
):
    limit = chunk_limit(start, chunk_tokens, attention, block_size)
    step = max(chunk_tokens // STEP_SHARE // block_size * block_size, min(block_size, chunk_tokens))
    assert limit % step == 0 or limit == chunk_tokens
    assert 1 <= limit <= chunk_tokens
    first = cost(0, chunk_tokens, attention)
    if limit > MIN_STEPS * step:
        assert cost(start, limit - step // 2 - 1, attention) <= first * (1 + 1e-9)
    if limit < chunk_tokens:
        assert cost(start, limit + step // 2 + 1, attention) > first


def test_without_attention_chunks_are_equally_long():
    assert {chunk_limit(start, 500, 0.0, 64) for start in range(0, 100_000, 999)} == {500}


def chunks_of(chunk_attention: float) -> list[int]:
    scheduler = Scheduler(BlockPool(64), 16, 256, 4, 2000, chunk_attention=chunk_attention)
    scheduler.add(make_sequence("r", [1] * 1000, 1))
    plans = iter(scheduler.schedule, None)
    return [plan.entries[0].num_tokens for plan in plans]


def test_the_scheduler_plans_them_one_after_the_other():
    """Attention of 1,000 tokens of prefix doubles what a token costs."""
    assert chunks_of(0.0) == [256, 256, 256, 232]
    assert chunks_of(0.0005) == [256, 224, 192, 160, 160, 8]
