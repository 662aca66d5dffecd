"""A client that leaves takes its request with it, at once, wherever it was."""

import asyncio
import json

import grpc
import httpx
import pytest
import uvloop

from protos import inference_pb2, inference_pb2_grpc
from tests.conductor.fakes import MODEL, WAIT, serving, spoken

CHAT = "/v1/chat/completions"


def body(**fields) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}).encode()


async def open_call(api, payload: bytes, declared: int | None = None):
    """Send a call by hand, so that the connection can be cut at any byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {declared or len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


def stops_after(model, num_tokens: int):
    """A model that says so many tokens and then nothing more."""
    return lambda request: [*spoken(model, "hello there")[:num_tokens], WAIT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
async def test_leaving_while_no_token_flows_cancels(model, stream, n, num_tokens):
    async with serving(model, stops_after(model, num_tokens)) as api:
        reader, writer = await open_call(api, body(stream=stream, n=n))
        # The other choices start when the first has its prompt computed, to find it.
        started = n if num_tokens else 1
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == started)
        if stream and num_tokens:
            await reader.readuntil(b'"role":"assistant"')
        writer.close()
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
        assert api.dispatcher.num_cancelled == started
        await api.completions.wait_idle()


async def test_leaving_in_the_middle_of_a_flood_cancels(model):
    """More than any socket buffer holds: the server is stuck writing when the client goes."""

    def endless(request):
        part = spoken(model, "x" * 200, per_step=200)[0]
        while True:
            yield part

    async with serving(model, endless) as api:
        reader, writer = await open_call(api, body(stream=True))
        await reader.readuntil(b'"role":"assistant"')
        writer.transport.abort()
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
        assert api.dispatcher.num_cancelled == 1


async def test_leaving_before_the_body_is_sent_ends_the_call(model):
    async with serving(model, lambda request: []) as api:
        _, writer = await open_call(api, body()[:-1], declared=len(body()))
        writer.close()
        async with asyncio.timeout(60):
            await api.completions.wait_idle()
        assert api.dispatcher.requests == []


LONG = "x" * (16 << 20)


def call_of(path, sent=b""):
    head = f"{'POST' if sent else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
    return head.encode() + sent


async def asked_by_halves(model, *calls):
    """Return the answer to a client that closes its side of the connection once it has asked."""

    async def replay(body):
        return LONG

    async with serving(model, stops_after(model, 1), reports={"/v1/replay": replay}) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
        writer.write(b"".join(calls))
        writer.write_eof()
        async with asyncio.timeout(60):
            answer = await reader.read()
            await api.completions.wait_idle()
        writer.close()
        return answer, api.dispatcher.num_cancelled


HEALTH = call_of("/health")
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


@LOOPS
def test_who_has_asked_and_closes_its_side_gets_what_is_there_at_once(model, run):
    assert run(asked_by_halves(model, *[HEALTH] * 3))[0].count(b"200 OK") == 3
    replay = call_of("/v1/replay", b'{"nodes": ["1P1D"]}')
    for calls in [replay], [replay, call_of(CHAT, body())]:
        answer, _ = run(asked_by_halves(model, *calls))
        assert answer.endswith(LONG.encode() + b'"'), "the rest of a long answer is lost"


@LOOPS
def test_for_who_closes_its_side_nothing_is_generated(model, run):
    """It may have left: that looks the same, until something is written to it."""
    for behind in [], [HEALTH], [call_of(CHAT, body())]:
        assert run(asked_by_halves(model, call_of(CHAT, body()), *behind)) == (b"", 1)


@pytest.mark.parametrize("behind", [b"", HEALTH, call_of(CHAT, body())])
async def test_leaving_ends_the_call_that_is_answered_whatever_was_asked_behind_it(model, behind):
    async with serving(model, stops_after(model, 1)) as api:
        _, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
        writer.write(call_of(CHAT, body()) + behind)
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
        writer.close()
        async with asyncio.timeout(60):
            await api.completions.wait_idle()
        assert (api.dispatcher.num_cancelled, len(api.dispatcher.requests)) == (1, 1)


async def test_cancelled_sequences_are_counted_and_none_stays_running(model):
    async with serving(model, stops_after(model, 1)) as api, httpx.AsyncClient(base_url=api.url) as client:
        _, writer = await open_call(api, body(stream=True))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
        writer.close()
        await api.completions.wait_idle()
        metrics = (await client.get("/metrics")).text
    assert 'conductor_sequences_total{outcome="cancelled"} 1.0' in metrics
    assert "conductor_running_sequences 0.0" in metrics


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
async def test_grpc_call_that_is_cancelled_cancels(model, num_tokens):
    async with serving(model, stops_after(model, num_tokens)) as api:
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="hello"))
            await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
            for _ in range(num_tokens):
                await call.read()
            call.cancel()
            await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
        assert api.dispatcher.num_cancelled == 1
        await api.completions.wait_idle()


async def test_grpc_client_that_stops_reading_and_goes_cancels(model):
    """Its stream's window is full, so the server is stuck writing when the client goes."""

    def endless(request):
        part = spoken(model, "x" * 200, per_step=200)[0]
        while True:
            yield part

    async with serving(model, endless) as api:
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(text="hello")
            )
            await call.read()
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
        assert api.dispatcher.num_cancelled == 1


async def test_grpc_deadline_is_the_requests_and_ends_it(model):
    timeout_s = 0.5
    async with serving(model, lambda request: [WAIT]) as api:
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await channel.channel_ready()
            while not api.dispatcher.requests:  # its time may run out on the way, on a busy machine
                timeout_s *= 2
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(inference_pb2.GenerateRequest(text="hello"), timeout=timeout_s).read()
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # The library rounds what is left up to a hundredth of a second when it writes the call's header; on a
    # fast machine the way there takes less than it added.
    assert 0 < api.dispatcher.requests[0].deadline_s <= timeout_s + 0.01
