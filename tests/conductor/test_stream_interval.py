"""Pieces of one answer keep their distance, and no token is lost by it."""

from contextlib import aclosing
from itertools import pairwise

import pytest

from base.request import FinishReason, Request, RequestId, SamplingParams, StopParams
from conductor.dispatch import Limits
from conductor.scheduler_settings import SchedulerSettings
from tests.conductor.stub_cluster import COST, cluster
from tests.conductor.virtual_loop import run

TOKENS = 60


@pytest.mark.parametrize("steps", [0, 5])
def test_tokens_that_come_within_the_interval_go_out_together(steps):
    step_s = COST.decode_step_s(1, 0)
    limits = Limits(stream_interval_s=steps * step_s * 0.999)

    async def scenario(clock):
        asked = Request(RequestId("r"), tuple(range(50)), SamplingParams(), StopParams(TOKENS))
        pieces = []
        async with (
            cluster(clock, SchedulerSettings(), limits=limits) as (dispatcher, _),
            aclosing(dispatcher.generate(asked)) as generated,
        ):
            async for piece in generated:
                pieces.append((clock.now_s(), len(piece.tokens), piece.finish_reason))
        return pieces

    pieces = run(scenario)
    assert sum(count for _, count, _ in pieces) == TOKENS
    assert pieces[-1][2] is FinishReason.LENGTH
    assert len(pieces) == (TOKENS if steps == 0 else pytest.approx(TOKENS / steps, abs=2))
    for (before_s, *_), (at_s, *_) in pairwise(pieces[:-1]):
        assert at_s - before_s >= limits.stream_interval_s - 1e-9
