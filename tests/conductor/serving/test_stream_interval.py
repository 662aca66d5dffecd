"""Pieces of one answer keep their distance, and no token is lost by it."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from base.config import ServerConfig
from base.request import FinishReason, Request, RequestId, SamplingParams, StopParams
from bench.virtual_cluster import COST, node_infos, virtual_cluster
from bench.virtual_loop import run
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving import dispatch
from conductor.serving.dispatch import STREAMING_SHARE

TOKENS = 60


@pytest.mark.parametrize("steps", [0, 5])
def test_tokens_that_come_within_the_interval_go_out_together(steps):
    step_s = COST.decode_step_s(1, 0)
    server = ServerConfig(stream_interval_ms=steps * step_s * 999)

    async def scenario(clock):
        asked = Request(RequestId("r"), tuple(range(50)), SamplingParams(), StopParams(TOKENS))
        pieces = []
        async with (
            virtual_cluster(clock, SchedulerSettings(), node_infos(), server=server) as (dispatcher, _),
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
        assert at_s - before_s >= server.stream_interval_ms / 1e3 - 1e-9


def test_many_streams_take_no_more_than_their_share_of_the_event_loop(monkeypatch):
    streams, tokens, piece_s = 40, 100, 1e-3
    monkeypatch.setattr(dispatch, "PIECE_S", piece_s)

    async def one(dispatcher, clock, number):
        asked = Request(RequestId(f"r{number}"), (number,) * 20, SamplingParams(), StopParams(tokens))
        async with aclosing(dispatcher.generate(asked)) as generated:
            return [(clock.now_s(), len(piece.tokens)) async for piece in generated]

    async def scenario(clock):
        async with (
            virtual_cluster(clock, SchedulerSettings(), node_infos()) as (dispatcher, _),
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(one(dispatcher, clock, number)) for number in range(streams)]
            return await asyncio.gather(*tasks)

    answers = run(scenario)
    assert {sum(count for _, count in pieces) for pieces in answers} == {tokens}
    moments = sorted(at_s for pieces in answers for at_s, _ in pieces[1:-1])
    took_s = moments[-1] - moments[0]
    assert len(moments) * piece_s <= STREAMING_SHARE * took_s * 1.2
    assert len(moments) < streams * tokens / 2
