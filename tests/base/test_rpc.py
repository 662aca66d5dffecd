"""A server that has no time yet: calls wait for it, and are told what it says to them."""

import asyncio
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from base.errors import SloUnreachableError, UnauthenticatedError
from base.rpc import MAX_WATCHES, Port, Service, admit_all, start_server
from protos import inference_pb2, inference_pb2_grpc

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
async def serving(admit=admit_all):
    """A server on the test's event loop: it takes up no call while the test keeps that busy."""
    service = Service(
        "conductor.v1.Inference",
        lambda server: inference_pb2_grpc.add_InferenceServicer_to_server(Rejecting(), server),
    )
    server, port, _ = await start_server([service], lambda: True, Port("127.0.0.1:0"), 1 << 20, admit)
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
