"""What tenants share: nobody takes all of it, each choice counts, and everything is given back."""

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from base.errors import RejectedError, UnavailableError
from base.metrics import ConductorMetrics, process_registry
from conductor.api.access import Client
from conductor.api.completion import MAX_BODIES, Completions
from conductor.api.shares import Shares
from tests.conductor.api.test_access import SetClock
from tests.conductor.fakes import MODEL, WAIT, ScriptedDispatcher, serving

TOTAL = 100
takes = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=40)


@given(takes)
def test_no_tenant_has_more_than_half_and_all_together_have_the_total(asked):
    shares, taken = Shares(TOTAL, is_shared=True), {"a": 0, "b": 0, "c": 0}
    for tenant, amount in asked:
        if shares.take(tenant, amount):
            taken[tenant] += amount
            assert 2 * taken[tenant] <= TOTAL + amount
        assert shares.num_taken == sum(taken.values()) <= TOTAL
    for tenant, amount in taken.items():
        shares.give_back(tenant, amount)
    assert shares.num_taken == 0


def test_a_tenant_that_floods_leaves_something_for_each_that_comes():
    shares = Shares(1024, is_shared=True)
    given_to = {}
    for tenant in "abcd":
        given_to[tenant] = 0
        while shares.take(tenant, 1):
            given_to[tenant] += 1
    assert given_to == {"a": 512, "b": 256, "c": 128, "d": 64}


def test_nothing_more_is_refused_to_nobody():
    """A call of one choice asks for none beside it, maybe after others have left its tenant too much."""
    shares = Shares(TOTAL, is_shared=True)
    assert shares.take("a", 50)
    assert shares.take("b", 25)
    assert not shares.take("a", 1)
    assert shares.take("a", 0)
    assert shares.num_taken == 75


async def test_a_call_is_cut_off_once(model):
    held = completions(model, max_calls=8)

    async def called():
        with held.call(Client()):
            held.cut_off()
            held.cut_off()
            await asyncio.sleep(0)

    with pytest.raises(UnavailableError):
        await called()
    assert asyncio.current_task().cancelling() == 0


def test_where_tenants_are_not_told_apart_one_may_take_all():
    shares = Shares(TOTAL, is_shared=False)
    assert shares.take("", TOTAL)
    assert not shares.take("", 1)


def completions(model, **more) -> Completions:
    metrics = ConductorMetrics(process_registry(), MODEL)
    return Completions(model, ScriptedDispatcher([]), metrics, SetClock(), **more)


async def test_what_a_call_took_is_free_again_when_it_ends(model):
    held = completions(model, max_calls=8, max_body_bytes=10)
    with held.call(Client("a")) as call:
        call.take_places(7)
        call.take_bytes(MAX_BODIES * 10)
        with pytest.raises(RejectedError, match="8 of 8 sequences"), held.call(Client("b")):
            pass
        with pytest.raises(RejectedError, match="bodies of calls in progress"):
            call.take_bytes(1)
    assert (held.places.num_taken, held.bodies.num_taken) == (0, 0)


async def test_every_choice_of_a_call_takes_a_place(model):
    async with (
        serving(model, lambda request: [WAIT], max_calls=4) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        body = {"model": MODEL, "prompt": "x", "n": 5}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        waiting = asyncio.ensure_future(
            client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 3})
        )
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open)
        assert api.completions.places.num_taken == 3
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await api.completions.wait_idle()
    assert api.completions.places.num_taken == 0


async def test_bodies_that_are_not_read_to_their_end_are_bounded_together(model):
    async with serving(model, lambda request: [WAIT], max_calls=100, max_body_mib=1 / 1024) as api:
        assert api.completions.bodies.total == MAX_BODIES * 1024
        host, port = "127.0.0.1", api.ports.http_port
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1024\r\n\r\n"
        opened = [await asyncio.open_connection(host, port) for _ in range(MAX_BODIES + 1)]
        refused = asyncio.get_running_loop().create_future()

        async def answer(reader):
            status = await reader.readline()
            if status and not refused.done():
                refused.set_result(status)

        readers = [asyncio.ensure_future(answer(reader)) for reader, _ in opened]
        for _, writer in opened:
            writer.write(head + b" " * 1000)
        assert b"429" in await refused
        for reader in readers:
            reader.cancel()
        for _, writer in opened:
            writer.close()
        await api.completions.wait_idle()
    assert api.completions.bodies.num_taken == 0
