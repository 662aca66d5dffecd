"""An answer that ends before its sequence does, by its text: it was served, and nobody left."""

import random
from contextlib import aclosing

import pytest

from base.clock import SystemClock
from base.messages import Tokens
from base.metrics import ConductorMetrics, process_registry
from base.request import FinishReason, RequestId, Role, Slo
from conductor.api.completion import Completions
from conductor.api.headers import Caller
from conductor.api.options import Options, make_request
from conductor.serving.generated import enough
from conductor.serving.traffic import Traffic, measured
from tests.conductor.dispatching import conductor, request, until
from tests.conductor.fakes import MODEL
from tests.conductor.scripted_node import ScriptedWork


def counted(traffic):
    told = measured(traffic.records(), Slo())
    return told["completed"], told["failed"]


@pytest.mark.parametrize("roles", [((Role.PREFILL, Role.DECODE),), ((Role.PREFILL,), (Role.DECODE,))])
async def test_a_stream_that_is_ended_by_enough_is_served_and_held_nowhere(roles):
    traffic = Traffic(SystemClock())
    works = [ScriptedWork(answer_tokens=range(11, 30)) for _ in roles]
    async with conductor(observers=[traffic]) as running:
        for number, work in enumerate(works):
            await running.attach(work, node_id=f"a{number}", roles=roles[number])
        async with aclosing(running.dispatcher.generate(request(max_tokens=40))) as pieces:
            assert (await anext(pieces)).finish_reason is None
            await enough(pieces)
        assert (running.dispatcher.num_running, running.view.num_in_flight) == (0, 0)
        await until(lambda: not any(work.held() for work in works))
        [(_, actual)] = running.seen.endings
    assert actual.end == "finished"
    assert counted(traffic) == (1, 0)


async def test_what_a_stop_string_ends_is_let_go_of_before_its_client_has_read_the_last_piece(model):
    traffic, work, clock = Traffic(SystemClock()), ScriptedWork(silent_on=Tokens), SystemClock()
    metrics = ConductorMetrics(process_registry(), MODEL)
    options = Options(stop=(model.tokenizer.decode([11], skip_special_tokens=False),))
    asked = make_request(
        RequestId("r"), tuple(range(20)), options, Caller(0.0, Slo()), model, random.Random(1)
    )
    async with conductor(observers=[traffic]) as running:
        await running.attach(work)
        completions = Completions(model, running.dispatcher, metrics, clock, max_calls=1)
        async with aclosing(completions.generate(asked)) as pieces:
            assert (await anext(pieces)).finish_reason is FinishReason.STOP
            assert running.view.num_in_flight == 0
            await until(lambda: not work.held())
            assert [piece async for piece in pieces] == []
    assert counted(traffic) == (1, 0)
