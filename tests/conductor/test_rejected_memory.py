"""What a rejected request held is free at once: under ten times too much load the garbage collector would
take its time from everybody."""

import asyncio
import gc
import json
import random

import grpc
import pytest

from base.errors import SloUnreachableError
from base.request import RequestId
from conductor.api.http_reply import BodyError
from conductor.placing.fair_queue import Criticality, Waiting
from conductor.placing.placement_queue import PlacementQueue
from conductor.serving.waiting import wait_until_placed
from protos import inference_pb2, inference_pb2_grpc
from tests.conductor.fakes import MODEL, serving
from tests.manual_clock import ManualClock
from tests.uncollected import uncollected

BODY = json.dumps({"model": MODEL, "prompt": "hello", "stream": True}).encode()


def rejected(request):
    return [SloUnreachableError("predicted 2 s", 3.2)]


def num_rejections():
    return sum(type(item) is SloUnreachableError for item in gc.get_objects())


@pytest.fixture
def num_kept():
    """How many rejections there are of those made since the test's begin, with no garbage collected since."""
    gc.disable()
    gc.freeze()  # what was there before is among no objects that the collector lists
    yield num_rejections
    gc.enable()


async def ask_http(reader, writer):
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return int(head.split()[1])


async def test_a_rejected_http_call_leaves_nothing_to_collect(model, num_kept):
    async with serving(model, rejected) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
        assert {await ask_http(reader, writer) for _ in range(4)} == {429}
        # A connection's next call begins when the last has ended.
        writer.close()
        await api.completions.wait_idle()
        assert num_kept() <= 1


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_that_is_too_long_leaves_nothing_to_collect(model, is_declared):
    """Its bytes are in the frames that read it."""
    length = b"Content-Length: 4000000" if is_declared else b"Transfer-Encoding: chunked"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % length
    body = b"" if is_declared else b"%x\r\n%b\r\n" % (1 << 18, b"x" * (1 << 18)) * 8
    async with serving(model, rejected) as api:
        with uncollected() as left:
            reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
            writer.write(head + body)
            assert (await reader.readuntil(b"\r\n")).split()[1] == b"413"
            writer.close()
            await api.completions.wait_idle()
            await asyncio.sleep(0)
            assert left(BodyError) == []


async def test_a_rejected_grpc_call_leaves_nothing_to_collect(model, num_kept):
    async with (
        serving(model, rejected) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError, match="predicted 2 s"):
                await stub.Generate(inference_pb2.GenerateRequest(text="hello")).read()
        await api.completions.wait_idle()
        assert num_kept() <= 1


async def test_who_was_rejected_after_waiting_leaves_nothing_to_collect(num_kept):
    is_hopeless, clock = False, ManualClock()

    def attempt(ahead_s):
        if is_hopeless:
            raise SloUnreachableError("predicted 2 s", 3.2)
        return False

    async def wait(queue, number):
        item = Waiting(
            RequestId(str(number)), Criticality.STANDARD, "", 100.0, random.Random(number).random()
        )
        with pytest.raises(SloUnreachableError):
            await wait_until_placed(queue, item, attempt, 100.0, 100.0, clock)

    queue = PlacementQueue(8, 10.0, lambda decodes: None, lambda: 1, clock.now_s())
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(wait(queue, number))
        await asyncio.sleep(0)
        is_hopeless = True
        queue.pump(clock.now_s())
    assert num_kept() <= 1


async def test_who_waited_past_its_slo_leaves_nothing_to_collect(num_kept):
    clock = ManualClock()
    queue = PlacementQueue(8, 10.0, lambda decodes: None, lambda: 1, clock.now_s())
    for number in range(4):
        item = Waiting(RequestId(str(number)), Criticality.STANDARD, "", 100.0, 1.0)
        with pytest.raises(SloUnreachableError):
            await wait_until_placed(queue, item, lambda ahead_s: False, clock.now_s(), 1e9, clock)
    assert num_kept() <= 1
