"""Ten times too much load, in virtual time: the dispatcher as it is, and nodes that take a profile's time."""

import asyncio
import random
from contextlib import aclosing

import pytest

from base.config import EngineConfig
from base.errors import RejectedError, UnavailableError
from base.request import Request, RequestId, SamplingParams, StopParams
from bench.overload import (
    CAPACITY,
    MAX_TOKENS,
    PROMPT_TOKENS,
    SLO,
    Asked,
    normal_after_s,
    summary,
)
from bench.virtual_cluster import COST, node_infos, virtual_cluster
from bench.virtual_loop import run
from conductor.placing.scheduler import turn_of
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving import dispatch

SETTINGS = SchedulerSettings(ttft_headroom=0.85, ahead_s=0.1)
OVERLOAD_S = 8.0


async def ask(dispatcher, request, at_s, clock):
    begin_s, first_s, last_s, count = clock.now_s(), None, 0.0, 0
    try:
        async with aclosing(dispatcher.generate(request)) as pieces:
            async for piece in pieces:
                last_s = clock.now_s()
                first_s = last_s if first_s is None else first_s
                count += len(piece.tokens)
    except RejectedError:
        rejected_after_s = clock.now_s() - begin_s if first_s is None else None
        return Asked(at_s, rejected_after_s, first_s)
    return Asked(at_s, None, first_s - begin_s, (last_s - first_s) / (count - 1), True)


def request(rng, priority=0):
    tokens = tuple(rng.randrange(20_000) for _ in range(PROMPT_TOKENS))
    return Request(
        RequestId(f"{rng.getrandbits(64):x}"),
        tokens,
        SamplingParams(),
        StopParams(MAX_TOKENS),
        None,
        SLO,
        priority,
    )


async def stretch(dispatcher, clock, rate, seconds, rng, priorities=(0,)):
    begin_s, due_s, tasks = clock.now_s(), 0.0, []
    async with asyncio.TaskGroup() as group:
        while (due_s := due_s + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(begin_s + due_s - clock.now_s())
            asked = request(rng, rng.choice(priorities))
            tasks.append((asked, group.create_task(ask(dispatcher, asked, due_s, clock))))
    return [(asked.priority, task.result()) for asked, task in tasks]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_ten_times_too_much_load_is_borne(seed):
    async def scenario(clock):
        rng = random.Random(seed)
        async with virtual_cluster(clock, SETTINGS, node_infos()) as (dispatcher, _):
            peak = 0.0
            for share in (0.8, 1.0, 1.2):
                rows = [row for _, row in await stretch(dispatcher, clock, CAPACITY * share, 10.0, rng)]
                peak = max(peak, summary(CAPACITY * share, 10.0, rows, 2.0).goodput)
            rows = [row for _, row in await stretch(dispatcher, clock, CAPACITY * 10, OVERLOAD_S, rng)]
            overload = summary(CAPACITY * 10, OVERLOAD_S, rows, 1.0)
            after = [row for _, row in await stretch(dispatcher, clock, CAPACITY * 0.7, 10.0, rng)]
            return peak, overload, normal_after_s(after)

    peak, overload, normal_s = run(scenario)
    assert peak > 0.8 * CAPACITY
    assert overload.goodput >= 0.9 * peak
    assert overload.accepted_p99_ttft_s <= SLO.ttft_slo_s
    assert overload.rejection_p99_s <= 0.05
    assert overload.failed == 0
    assert normal_s <= 5.0


def test_a_stall_that_puts_every_prediction_past_its_bound_is_forgotten_when_it_is_over():
    async def scenario(clock):
        rng = random.Random(4)
        async with virtual_cluster(clock, SETTINGS, node_infos()) as (dispatcher, view):
            while len(view.node_ids()) < 4:
                await asyncio.sleep(0)
            for node_id in view.node_ids():
                for term in ("prefill", "decode", "handoff"):
                    view.corrections.observe(node_id, term, 0.01, 1.0)
                view.corrections.observe_added(node_id, 10.0)
            return [row for _, row in await stretch(dispatcher, clock, CAPACITY * 0.7, 15.0, rng)]

    rows = run(scenario)
    assert rows[0].rejected_after_s is not None, "nothing was to be forgotten"
    assert normal_after_s(rows) <= 5.0


def test_under_overload_the_higher_class_is_served_and_the_lowest_is_not():
    async def scenario(clock):
        rng = random.Random(3)
        async with virtual_cluster(clock, SETTINGS, node_infos()) as (dispatcher, _):
            return await stretch(dispatcher, clock, CAPACITY * 2.4, 10.0, rng, priorities=(-1, 0, 0, 1))

    rows = run(scenario)
    good = {
        priority: sum(row.is_good for level, row in rows if level == priority)
        / sum(level == priority for level, _ in rows)
        for priority in (-1, 0, 1)
    }
    assert good[1] > 0.95
    assert good[-1] < 0.1
    assert good[-1] < good[0] < good[1]


def test_who_waits_is_placed_when_the_queue_is_short_enough_though_no_node_says_anything():
    settings = SchedulerSettings(ahead_s=0.5)
    engine = EngineConfig(chunk_tokens=16_384)
    seconds = COST.prefill_s(10_000, 0)
    assert 2.0 + 0.5 < seconds < 4.0, "no heartbeat comes just then"

    async def scenario(clock):
        came_s = []

        async def first_token(dispatcher, name, length):
            asked = Request(RequestId(name), (int(name),) * length, SamplingParams(), StopParams(1))
            async with aclosing(dispatcher.generate(asked)) as pieces:
                async for _ in pieces:
                    came_s.append(clock.now_s())

        nodes = node_infos(1, 1)
        async with (
            virtual_cluster(clock, settings, nodes, engine=engine) as (dispatcher, view),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(first_token(dispatcher, "1", 10_000))
            await asyncio.sleep(0.1)
            group.create_task(first_token(dispatcher, "2", 100))
            while view.num_queued < 2 and not came_s:
                await asyncio.sleep(0.01)
            placed_s = clock.now_s()
        return placed_s, came_s

    placed_s, (first_s, _) = run(scenario)
    assert first_s - placed_s == pytest.approx(0.5, abs=0.05)


def test_who_waits_for_a_role_is_not_tried_all_the_time(monkeypatch):
    tried_s = []

    async def scenario(clock):
        def noted(*arguments):
            tried_s.append(clock.now_s())
            return turn_of(*arguments)

        monkeypatch.setattr(dispatch, "turn_of", noted)
        async with virtual_cluster(clock, SETTINGS, node_infos(1, 0)) as (dispatcher, _):
            asked = Request(RequestId("r"), (1,) * 100, SamplingParams(), StopParams(1))
            with pytest.raises(UnavailableError, match="no decode node"):
                await anext(dispatcher.generate(asked))
            return clock.now_s()

    assert run(scenario) >= 10.0
    assert 1 <= len(tried_s) < 10
