"""A server that has no time yet: calls wait for it, and are told what it says to them."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from base import rpc
from base.errors import SloUnreachableError, UnauthenticatedError
from base.rpc import MAX_WATCHES, Port, Service, admit_all, start_server
from base.tls import Certificates
from protos import inference_pb2, inference_pb2_grpc
from tests.certificates import Authority

REQUEST = inference_pb2.GenerateRequest(text="hello")


class Rejecting(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):  # noqa: N802
        raise SloUnreachableError("predicted 2 s", 3.2)
        yield


@contextmanager
def admit_nobody(method, context):
    raise UnauthenticatedError("no key")
    yield


@asynccontextmanager
async def serving(admit=admit_all, credentials=None):
    """A server on the test's event loop: it takes up no call while the test keeps that busy."""
    service = Service(
        "conductor.v1.Inference",
        lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(Rejecting(), server),
    )
    server, port, _ = await start_server(
        [service], lambda: True, Port("127.0.0.1:0", credentials), 1 << 20, admit
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def stubs():
    """Clients with threads of their own, by address; each has a connection of its own."""
    channels = []

    def connected(address, count):
        made = [
            grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) for _ in range(count)
        ]
        channels.extend(made)
        for channel in made:
            grpc.channel_ready_future(channel).result(10)
        return [inference_pb2_grpc.InferenceStub(channel) for channel in made]

    yield connected
    for channel in channels:
        channel.close()


def ended(calls):
    """Return what became of each call, when it has ended."""
    return [(call.code(), call.details(), rpc_status.from_call(call)) for call in calls]


async def test_every_call_that_waited_for_a_busy_server_is_told_when_to_come_again(stubs):
    async with serving() as address:
        calls = [stub.Generate(REQUEST, timeout=60) for stub in stubs(address, 2) for _ in range(900)]
        outcomes = await asyncio.to_thread(ended, calls)
    assert {(code, details) for code, details, _ in outcomes} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "predicted 2 s")
    }
    retry = error_details_pb2.RetryInfo()
    assert all(any(detail.Unpack(retry) for detail in status.details) for *_, status in outcomes)


async def test_calls_that_were_given_up_take_no_place_from_the_next(stubs):
    async with serving() as address:
        (stub,) = stubs(address, 1)
        for _ in range(1_200):
            stub.Generate(REQUEST, timeout=60).cancel()
        calls = [stub.Generate(REQUEST, timeout=60) for _ in range(50)]
        outcomes = await asyncio.to_thread(ended, calls)
    assert {code for code, *_ in outcomes} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def late(num_turns, message):
    """Write after so many turns of the event loop, each some microseconds."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    yield message


@pytest.mark.parametrize("message", [b"", b"no message of this method"])
async def test_a_refused_stream_is_told_why_whenever_it_writes_its_first_message(message):
    async with serving(admit_nobody) as address, grpc.aio.insecure_channel(address) as channel:
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        outcomes = set()
        for num_turns in range(200):
            call = reflect(late(num_turns, message))
            outcomes.add((await call.code(), await call.details()))
    assert outcomes == {(grpc.StatusCode.UNAUTHENTICATED, "no key")}


async def test_a_refused_stream_that_writes_nothing_is_told_too():
    async def nothing():
        await asyncio.Event().wait()
        yield b""

    async with serving(admit_nobody) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
            nothing(), timeout=60
        )
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_watched_by_so_many_at_once_and_no_more():
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHES)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        refused = stub.Watch(health_pb2.HealthCheckRequest())
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status
        watches[0].cancel()
        # The server forgets it a little later; the place is free then.
        while (await (again := stub.Watch(health_pb2.HealthCheckRequest())).read()) is grpc.aio.EOF:
            assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_so_many_reflect_at_once_and_no_more():
    ask = reflection_pb2.ServerReflectionRequest(list_services="")

    async def held():
        yield ask
        await asyncio.Event().wait()

    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        calls = [stub.ServerReflectionInfo(held(), timeout=60) for _ in range(MAX_WATCHES)]
        for call in calls:
            assert (await call.read()).list_services_response.service
        refused = stub.ServerReflectionInfo(held(), timeout=60)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Watch(health_pb2.HealthCheckRequest(), timeout=60).read()).status
        calls[0].cancel()
        while (await (again := stub.ServerReflectionInfo(held(), timeout=60)).read()) is grpc.aio.EOF:
            assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def unanswered(address):
    """Connect and say nothing; return when the server has closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    writer.close()


@pytest.mark.parametrize("secured", [False, True])
async def test_connections_beyond_a_bound_are_closed_and_those_that_are_there_are_served(
    tmp_path, monkeypatch, secured
):
    monkeypatch.setattr(rpc, "num_allowed", lambda share: 5)
    authority = Authority(tmp_path)
    credentials = Certificates(authority.issue("server", ca=False), "tls").for_grpc() if secured else None
    async with serving(credentials=credentials) as address:
        dialled = (
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.pem))
            if secured
            else grpc.aio.insecure_channel(address)
        )
        async with dialled as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            silent = [asyncio.create_task(unanswered(address)) for _ in range(20)]
            for ended_one in islice(asyncio.as_completed(silent, timeout=60), 16):
                await ended_one
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=60)).status
            for task in silent:
                task.cancel()


async def test_connections_that_do_not_go_on_with_the_handshake_end_and_give_their_places_up(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rpc, "num_allowed", lambda share: 5)
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_S", 1.0)
    authority = Authority(tmp_path)
    async with serving(
        credentials=Certificates(authority.issue("server", ca=False), "tls").for_grpc()
    ) as address:
        async with asyncio.timeout(60):
            await asyncio.gather(*(unanswered(address) for _ in range(20)))
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.pem)) as channel:
            asked = health_pb2.HealthCheckRequest()
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(asked, timeout=60, wait_for_ready=True)).status


async def test_a_connection_without_a_call_ends_and_the_next_call_opens_another(monkeypatch):
    monkeypatch.setattr(rpc, "IDLE_S", 0.05)
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=60)).status
        async with asyncio.timeout(60):
            while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
                await channel.wait_for_state_change(state)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)).status
