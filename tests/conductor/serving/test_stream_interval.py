"""Pieces of one answer keep their distance, and no token is lost by it."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from base.clock import Busy
from base.config import EngineConfig, ServerConfig
from base.request import FinishReason, Request, RequestId, SamplingParams, StopParams
from bench.overload import stub_profile
from bench.virtual_cluster import COST, node_infos, virtual_cluster
from bench.virtual_loop import run
from conductor.placing.cost_model import CostModel
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.stream_pace import LONGEST_S, LOOK_S, TARGET_SHARE

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


STREAMS = 100
STEP_S = 0.008
EIGHT_MS_STEPS = CostModel(
    replace(
        stub_profile(),
        prefill_fixed_s=1e-4,
        prefill_token_s=1e-6,
        decode_fixed_s=STEP_S,
        decode_sequence_s=0.0,
        decode_context_token_s=0.0,
    )
)
LOOKS_S = 10 * LOOK_S
"""After which the pace has come to rest."""


class BusyClock:
    """The loop's time, and a thread that is busy for `share` of it, and for `piece_s` with each piece."""

    def __init__(self, loop, piece_s, share=0.0):
        self._loop, self.piece_s, self._share = loop, piece_s, share
        self.pieces_s = 0.0

    def now_s(self):
        return self._loop.time()

    def busy(self):
        return Busy(self._share * self._loop.time() + self.pieces_s, 0.0)


def answers(piece_s, share=0.0, tokens=250, change=lambda clock: None, num_silent=0, **server):
    """Return for each of many streams (moment, tokens, busy with pieces until then) of each piece.

    A change is made to the clock after each piece. Of `num_silent` of them the client reads nothing but the
    first, until the others have ended.
    """
    others_ended = asyncio.Event()
    num_read = 0

    async def one(dispatcher, clock, number):
        nonlocal num_read
        asked = Request(RequestId(f"r{number}"), (number,) * 20, SamplingParams(), StopParams(tokens))
        pieces = []
        async with aclosing(dispatcher.generate(asked)) as generated:
            async for piece in generated:
                clock.pieces_s += clock.piece_s
                pieces.append((clock.now_s(), len(piece.tokens), clock.pieces_s))
                change(clock)
                if number < num_silent:
                    await others_ended.wait()
        num_read += 1
        if num_read == STREAMS - num_silent:
            others_ended.set()
        return pieces

    async def scenario(loop):
        clock = BusyClock(loop, piece_s, share)
        cluster = virtual_cluster(
            clock,
            SchedulerSettings(),
            node_infos(1, 1),
            EIGHT_MS_STEPS,
            ServerConfig(**server),
            engine=EngineConfig(max_batch=STREAMS),
        )
        async with (
            cluster as (dispatcher, _),
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(one(dispatcher, clock, number)) for number in range(STREAMS)]
            return await asyncio.gather(*tasks)

    found = run(scenario)
    assert {sum(count for _, count, _ in pieces) for pieces in found} == {tokens}
    return found


def between(found, from_s, until_s=inf):
    """Return the pieces of all streams in a time, but for each stream's first and last."""
    return sorted(piece for pieces in found for piece in pieces[1:-1] if from_s <= piece[0] < until_s)


def busy_share(pieces):
    (first_s, _, before_s), (last_s, _, after_s) = pieces[0], pieces[-1]
    return (after_s - before_s) / (last_s - first_s)


def test_each_token_goes_out_by_itself_while_the_event_loop_has_time():
    found = answers(piece_s=0.3 * STEP_S / STREAMS)
    assert {count for _, count, _ in between(found, LOOKS_S)} == {1}


def test_an_event_loop_that_pieces_would_fill_is_busy_for_its_share():
    found = answers(piece_s=2.0 * STEP_S / STREAMS)
    assert busy_share(between(found, LOOKS_S, 1.9)) == pytest.approx(TARGET_SHARE, rel=0.1)


def test_what_else_the_event_loop_does_is_taken_off_the_share_of_pieces():
    found = answers(piece_s=1.2 * STEP_S / STREAMS, share=0.3)
    assert busy_share(between(found, LOOKS_S, 1.9)) == pytest.approx(TARGET_SHARE - 0.3, rel=0.1)


def test_clients_that_read_nothing_make_no_other_wait():
    num_silent = STREAMS * 9 // 10
    found = answers(piece_s=0.1 * STEP_S / STREAMS, share=0.3, num_silent=num_silent)
    assert {count for _, count, _ in between(found[num_silent:], LOOKS_S)} == {1}


def test_tokens_go_out_one_by_one_again_once_the_event_loop_has_time_again():
    def change(clock):
        if clock.now_s() > 0.8:
            clock.piece_s = 0.3 * STEP_S / STREAMS

    found = answers(piece_s=2.0 * STEP_S / STREAMS, change=change)
    assert max(count for _, count, _ in between(found, 0.5, 0.8)) > 2
    assert {count for _, count, _ in between(found, 0.8 + LOOKS_S)} == {1}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_pieces_are_never_further_apart_than_streams_times_the_longest(share):
    found = answers(piece_s=1.0, share=share)
    gaps_s = [after - before for pieces in found for (before, *_), (after, *_) in pairwise(pieces)]
    # of two pieces the first may have waited for tokens, and the second for its end
    assert max(gaps_s) <= STREAMS * LONGEST_S + 2 * STEP_S
    assert max(gaps_s) >= STREAMS * LONGEST_S - 1e-9
