"""Starting, health and the drain of both listeners."""

import asyncio
import random
import socket
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from base.clock import SystemClock
from base.config import ServerConfig, SloConfig
from base.errors import ConfigError
from base.metrics import ConductorMetrics, process_registry
from conductor.api.completion import Completions
from conductor.api.server import listening, tcp_listener
from protos import inference_pb2, inference_pb2_grpc
from tests.conductor.fakes import MODEL, WAIT, ScriptedDispatcher, serving, spoken

ROOT = Path(__file__).parents[3]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def test_conductor_starts_without_torch():
    """It runs on hosts that have neither a GPU nor the libraries for one."""
    code = "import conductor.api.server, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


async def test_short_answer_waits_for_no_acknowledgement():
    """With Nagle's algorithm at work an answer's body waits 40 ms for the acknowledgement of its head."""
    accepted = asyncio.get_running_loop().create_future()
    with tcp_listener("127.0.0.1", 0, "server.http_port") as listener:
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener):
            _, ours = await asyncio.open_connection(*listener.getsockname())
            theirs = await accepted
            is_nagle_off = theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for writer in (ours, theirs):
                writer.close()
    assert is_nagle_off


async def test_health_follows_the_dispatcher(model):
    async with (
        serving(model, lambda request: []) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="conductor.v1.Inference"))
        assert (await watch.read()).status == SERVING
        api.dispatcher.is_ready = False
        api.ports.health.refresh()
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
        watch.cancel()
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_drain_lets_calls_end_and_takes_no_more(model):
    """The running call ends only when another one was refused."""
    refused = asyncio.Event()

    class Paused(ScriptedDispatcher):
        async def generate(self, request):
            async with aclosing(super().generate(request)) as steps:
                async for step in steps:
                    await refused.wait()
                    yield step

    dispatcher = Paused(lambda request: spoken(model, "hi"))
    completions = Completions(
        model, dispatcher, ConductorMetrics(process_registry(), MODEL), SystemClock(), 9
    )
    config = ServerConfig(http_port=0, grpc_port=0)
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:

        async def refuse_another():
            refusal = await client.post(f"{url}{CHAT}", json=HELLO)
            health = await client.get(f"{url}/health")
            refused.set()
            return refusal.status_code, health.status_code

        async with listening(completions, config, SloConfig(), random.Random(1)) as ports:
            url = f"http://127.0.0.1:{ports.http_port}"
            running = group.create_task(client.post(f"{url}{CHAT}", json=HELLO))
            await dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
            completions.drain()
            other = group.create_task(refuse_another())
    assert other.result() == (503, 503)
    assert running.result().json()["choices"][0]["message"]["content"] == "hi"


async def test_drain_that_takes_too_long_is_cut_short(model):
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        async with serving(model, lambda request: [WAIT], drain_s=0.05) as api:
            running = group.create_task(client.post(f"{api.url}{CHAT}", json=HELLO))
            await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
            group.create_task(_ended(running))
        assert api.dispatcher.num_open == 0
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{api.url}/health")


async def _ended(call: asyncio.Task) -> None:
    """The client is told, one way or the other."""
    try:
        answer = await asyncio.shield(call)
        assert answer.status_code >= 500
    except httpx.HTTPError:
        pass


async def test_port_in_use_is_a_configuration_error(model):
    async with serving(model, lambda request: []) as api:
        for key in ("http_port", "grpc_port"):
            taken = getattr(api.ports, key)
            config = ServerConfig(**{"http_port": 0, "grpc_port": 0, key: taken})
            with pytest.raises(ConfigError, match=str(taken)):
                async with listening(api.completions, config, SloConfig(), random.Random(1)):
                    pass


def asked(channel):
    """Begin a call over gRPC."""
    return inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(text="hello"))


async def test_what_is_cut_off_at_the_end_of_a_drain_is_unavailable_over_both_listeners(model):
    async with (
        serving(model, lambda request: [WAIT]) as api,
        httpx.AsyncClient() as client,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        posted = asyncio.create_task(client.post(f"{api.url}{CHAT}", json=HELLO))
        call = asked(channel)
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 2)
        api.completions.cut_off()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        answer = await posted
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
