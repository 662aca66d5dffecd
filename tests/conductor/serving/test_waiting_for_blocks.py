"""Requests that find no KV blocks free: who names no bound waits for those who decode to end."""

import asyncio

import pytest

from base.errors import CapacityError
from base.messages import Tokens
from base.request import FinishReason, Role, SampledToken, Slo
from conductor.placing.cluster_view import FULL_S
from conductor.placing.scheduler import a_finish_s
from tests.conductor.dispatching import answer, conductor, prefills, request, until
from tests.conductor.scripted_node import ScriptedWork
from tests.manual_clock import ManualClock


async def test_a_reservation_that_is_refused_is_made_once_the_node_has_blocks_again():
    clock = ManualClock()
    async with conductor(clock=clock) as running:
        full = ScriptedWork(is_full=True)
        await running.attach(ScriptedWork(), node_id="p", roles=[Role.PREFILL])
        await running.attach(full, node_id="d0", roles=[Role.DECODE])
        task = asyncio.create_task(answer(running.dispatcher, request()))
        await until(lambda: len(running.dispatcher.queue) == 1)
        assert len(full.received) == 1
        full.is_full = False
        clock.advance(FULL_S)
        assert await task == ([11, 12, 13], FinishReason.LENGTH)


async def test_who_names_no_bound_waits_for_the_blocks_of_those_who_decode():
    async with conductor(clock=ManualClock()) as running:
        both = ScriptedWork(silent_on=Tokens)
        await running.attach(both, num_blocks=3)
        tasks = [
            asyncio.create_task(answer(running.dispatcher, request(request_id=name)))
            for name in ("one", "two", "three")
        ]
        for last in ("one", "two", "three"):
            await until(lambda: len(prefills(both)) and prefills(both)[-1] == last)  # noqa: B023
            (running_id,) = both.held()
            both.done.add(running_id)
            both.send(Tokens(running_id, (SampledToken(12),), FinishReason.LENGTH))
        assert [await task for task in tasks] == 3 * [([11, 12], FinishReason.LENGTH)]
        assert prefills(both) == ["one", "two", "three"]


async def test_who_is_next_for_blocks_is_not_refused_for_those_who_wait_behind_it():
    async with conductor(max_waiting=64, clock=ManualClock()) as running:
        both = ScriptedWork(silent_on=Tokens)
        await running.attach(both, num_blocks=3)
        first = asyncio.create_task(answer(running.dispatcher, request(request_id="first")))
        await until(both.held)
        num_behind = int(60.0 / a_finish_s(running.view)) + 1
        assert num_behind < 64
        names = [(f"sheddable{number}", -1) for number in range(num_behind)] + [("critical", 1)]
        tasks = [
            asyncio.create_task(answer(running.dispatcher, request(request_id=name, priority=priority)))
            for name, priority in names
        ]
        await until(lambda: len(running.dispatcher.queue) == len(names))
        (held,) = both.held()
        both.done.add(held)
        both.send(Tokens(held, (SampledToken(12),), FinishReason.LENGTH))
        await first
        await until(lambda: prefills(both)[-1] == "critical")
        for task in tasks:
            task.cancel()


async def test_who_names_a_bound_and_finds_no_blocks_is_refused_at_once():
    async with conductor() as running:
        both = ScriptedWork(silent_on=Tokens)
        await running.attach(both, num_blocks=3)
        first = asyncio.create_task(answer(running.dispatcher, request(request_id="one")))
        await until(both.held)
        with pytest.raises(CapacityError):
            await answer(running.dispatcher, request(request_id="two", slo=Slo(ttft_slo_s=1e3)))
        assert not len(running.dispatcher.queue)
        first.cancel()
