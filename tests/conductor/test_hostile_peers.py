"""Bytes that no well-meant peer sends, on the conductor's listeners: refused cheaply, and nobody harmed.

Bodies of calls: tests/conductor/api/test_openai_errors.py and tests/conductor/api/test_openai_fuzz.py. The
data plane: tests/transfer/tcp/test_server.py and test_frame.py. Records on disk: tests/kvstore/test_disk.py.
Files: tests/test_hostile_files.py.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import grpc
import pytest
import uvicorn
from uvicorn.server import ServerState

from base import arrivals, rpc
from base.link import LENGTH_BYTES
from base.request import SampledToken
from bench import virtual_loop
from conductor.api import http_connection
from conductor.api.http_reply import to_json
from conductor.serving.generated import Generated
from protos import inference_pb2, inference_pb2_grpc, nodes_pb2
from tests.conductor import dispatching
from tests.conductor.dispatching import conductor
from tests.conductor.fakes import serving, spoken
from tests.conductor.scripted_node import ScriptedWork
from tests.effort import counting

MAX_LINES = 20_000
MAX_BYTES = 16 << 20
"""The most that one refusal may cost, ours and the peer's."""

MEBI = 1 << 20
HOSTILE_HTTP = {
    "noise": b"\x16\x03\x01\x00\xff\x01" * 50 + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "no method": b"\r\n\r\n /health HTTP/1.1\r\n\r\n",
    "NUL in the path": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\nx",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length of 2^70": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**70,
    "a body of a tebibyte": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**40,
    "a chunk of 2^60": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"fffffffffffffff\r\n" + b"x" * (2 * MEBI),
    "a chunk of no size": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\n: x\r\n\r\n",
    "10,000 headers": b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    "a header without end": b"GET /health HTTP/1.1\r\nx: " + b"y" * MEBI,
    "a path without end": b"GET /" + b"y" * MEBI,
    "10,000 calls at once": b"GET /nowhere HTTP/1.1\r\n\r\n" * 10_000,
}


SHORT = {"request_timeout_s": 0.05}


async def cheaply(name, ask):
    """Return what `ask` returns, which must cost little."""
    with counting() as effort:
        answer = await ask()
    assert effort.lines <= MAX_LINES, name
    assert effort.peak_bytes <= MAX_BYTES, name
    return answer


async def told(port, sent):
    """Send, and return what comes back until the connection ends or the answer is whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # A server that has seen enough closes while we still send.
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
            async with asyncio.timeout(60):
                return await reader.readuntil(b"\r\n\r\n")
        return b""
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.close()


async def test_no_bytes_on_the_http_port_make_it_fail(model):
    async with serving(model, lambda request: spoken(model, "hi")) as api:
        for name, sent in HOSTILE_HTTP.items():
            answer = await cheaply(name, partial(told, api.ports.http_port, sent))
            assert answer == b"" or answer.split()[1] in (b"400", b"404", b"413", b"505"), (name, answer[:80])
        assert b"200 OK" in await told(api.ports.http_port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not api.dispatcher.requests


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"], ids=["nothing", "half a head"])
@pytest.mark.parametrize("is_second", [False, True], ids=["first call", "second call"])
async def test_a_head_that_does_not_come_ends_the_connection(model, monkeypatch, sent, is_second):
    if not is_second:
        monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.05)
    async with serving(model, lambda request: []) as api:
        if is_second and not sent:
            return  # between two calls uvicorn's own timeout counts
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
        if is_second:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"}")
            monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.05)
        writer.write(sent)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_connections_that_ask_nothing_make_room_for_those_that_do(model, monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 1e6)
    async with serving(model, lambda request: []) as api:
        opened = [await asyncio.open_connection("127.0.0.1", api.ports.http_port) for _ in range(20)]
        for _ in range(3):
            assert b"200 OK" in await told(api.ports.http_port, b"GET /health HTTP/1.0\r\nHost: x\r\n\r\n")
        for reader, _ in opened[:18]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        for _, writer in opened:
            writer.close()


async def test_a_client_that_reads_nothing_of_its_answer_lets_go_of_its_request(model, monkeypatch):
    monkeypatch.setattr(http_connection, "READ_TIMEOUT_S", 0.05)
    part = Generated((SampledToken(70),) * 200, None, 0)
    body = b'{"model": "tiny", "prompt": "x", "stream": true, "return_token_ids": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(model, lambda request: itertools.repeat(part)) as api:
        with socket.create_connection(("127.0.0.1", api.ports.http_port)) as client:
            client.sendall(head + body)
            async with asyncio.timeout(60):
                while not api.dispatcher.num_cancelled:
                    await asyncio.sleep(0)
        assert api.dispatcher.num_open == 0


REPORT = {"table": "x" * (32 * MEBI)}
REPORTED = to_json(REPORT).encode()


@contextlib.asynccontextmanager
async def reporting(model, **options):
    """A conductor that was asked for a long report, with the reader of its answer, whose head was read."""

    async def replay(body):
        return REPORT

    body = b'{"nodes": ["1P1D"]}'
    head = b"POST /v1/replay HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(model, lambda request: [], reports={"/v1/replay": replay}, **options) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
        writer.write(head + body)
        async with asyncio.timeout(60):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            yield api.completions.places, reader
        writer.close()


async def test_an_answer_keeps_its_place_until_its_client_has_read_it(model):
    """Others would be let in while it is held: as many answers as there are connections."""
    async with reporting(model) as (places, reader):
        assert places.num_taken == 1
        assert await reader.readexactly(len(REPORTED)) == REPORTED
        while places.num_taken:
            await asyncio.sleep(0)


async def test_an_answer_that_is_not_read_in_time_is_cut_off_with_nothing_else_in_it(model):
    async with reporting(model, server=SHORT) as (places, reader):
        while places.num_taken:
            await asyncio.sleep(0)
        came = await reader.read(-1)
        assert len(came) < len(REPORTED)
        assert REPORTED.startswith(came)


async def test_an_answer_that_is_cut_off_is_no_error_of_ours(model, caplog):
    async with reporting(model, server=SHORT) as (places, reader):
        while places.num_taken:
            await asyncio.sleep(0)
        await reader.read(-1)
    assert any("returned without completing" in record.getMessage() for record in caplog.records)
    assert max(record.levelno for record in caplog.records) == logging.WARNING


async def test_what_is_no_call_over_http_has_a_line_together(model, caplog):
    """Anybody can send it, and would fill the disk."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with serving(model, lambda request: []) as api:
        for _ in range(20):
            assert b"400 Bad Request" in await told(api.ports.http_port, b"no HTTP\r\n\r\n")
            assert b"200 OK" in await told(api.ports.http_port, upgrade)
    for said in ("Invalid HTTP request", "Unsupported upgrade"):
        assert len([record for record in caplog.records if said in record.getMessage()]) == 1


async def read_to_its_end(call):
    while await call.read():
        pass


async def test_a_grpc_client_that_reads_nothing_lets_go_of_its_request_and_is_told_when_it_reads(
    model, monkeypatch
):
    monkeypatch.setattr(rpc, "WRITE_TIMEOUT_S", 0.05)
    part = Generated((SampledToken(70),) * 2000, None, 0)
    async with (
        serving(model, lambda request: itertools.repeat(part)) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(GENERATE(text="x"))
        await call.read()
        async with asyncio.timeout(60):
            while not api.dispatcher.num_cancelled:
                await asyncio.sleep(0)
        assert api.dispatcher.num_open == 0
        with pytest.raises(grpc.aio.AioRpcError, match="nothing of the answer was read"):
            await read_to_its_end(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_reads_a_little_now_and_then_lets_go_of_its_request_when_its_time_is_up(model):
    """It reads all the time, less than buffers hold: how slow a part of an answer is bounds nothing."""
    part = Generated((SampledToken(70),) * 200, None, 0)
    body = b'{"model": "tiny", "prompt": "x", "stream": true, "return_token_ids": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(model, lambda request: itertools.repeat(part), server=SHORT) as api:
        with socket.create_connection(("127.0.0.1", api.ports.http_port)) as client:
            client.sendall(head + body)
            client.setblocking(False)
            async with asyncio.timeout(60):
                while not api.dispatcher.num_cancelled:
                    with contextlib.suppress(BlockingIOError):
                        client.recv(1 << 12)
                    await asyncio.sleep(0)
        assert (api.dispatcher.num_open, api.completions.places.num_taken) == (0, 0)


async def test_a_grpc_client_whose_time_to_read_is_up_learns_it_when_it_reads_on(model):
    part = Generated((SampledToken(70),) * 2000, None, 0)
    async with (
        serving(model, lambda request: itertools.repeat(part), server=SHORT) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(GENERATE(text="x"))
        await call.read()
        async with asyncio.timeout(60):
            while api.completions.places.num_taken:
                await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError, match=r"longer than server\.request_timeout_s to read"):
                await read_to_its_end(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert api.dispatcher.num_open == 0


def test_a_line_of_uvicorns_has_the_values_that_it_names(caplog):
    async def main(loop):
        config = uvicorn.Config(lambda: None, ws="none", log_config=None)
        connection = http_connection.BoundedConnection(config, ServerState(), {}, loop)
        connection.logger.error("ASGI callable returned '%s'.", 7)
        connection.logger.error("100 % of the answer was cut off")

    virtual_loop.run(main)
    assert "returned '7'" in caplog.text
    assert "100 % of the answer" in caplog.text


GENERATE = inference_pb2.GenerateRequest
HOSTILE_GENERATE = {
    "nothing": b"",
    "noise": b"\xff" * 100,
    "a length past the end": b"\x0a\xff\xff\xff\xff\x0f",
    "a group without end": b"\x0b" * 1000,
    "text that is no UTF-8": b"\x12\x02\xff\xfe",
    "a negative token": GENERATE(token_ids=inference_pb2.TokenIds(ids=[2**31 - 1])).SerializeToString(),
    "no tokens": GENERATE(token_ids=inference_pb2.TokenIds()).SerializeToString(),
    "no turns": GENERATE(chat=inference_pb2.ChatMessages()).SerializeToString(),
    "another model": GENERATE(text="x", model="y" * 1000).SerializeToString(),
    "NaN": GENERATE(text="x", sampling=inference_pb2.Sampling(temperature=float("nan"))).SerializeToString(),
    "100 stops": GENERATE(text="x", stop=inference_pb2.Stop(strings=["s"] * 100)).SerializeToString(),
    "an endless answer": GENERATE(
        text="x", stop=inference_pb2.Stop(max_tokens=2**31 - 1)
    ).SerializeToString(),
    "a name with a line break": GENERATE(text="x", request_id="a\nb").SerializeToString(),
    "a long prompt": GENERATE(text="x" * 900_000).SerializeToString(),
    "a message too long": GENERATE(text="x" * 2_000_000).SerializeToString(),
}
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL"}


async def test_no_message_to_inference_reaches_a_worker(model):
    async with (
        serving(model, lambda request: spoken(model, "hi")) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        generate = channel.unary_stream("/conductor.v1.Inference/Generate")
        for name, sent in HOSTILE_GENERATE.items():
            code = await cheaply(name, lambda sent=sent: generate(sent, timeout=60).code())
            assert code.name in REFUSALS, name
        headers = (("x-long", "y" * 100_000),)
        assert await generate(b"", timeout=60, metadata=headers).code() != grpc.StatusCode.OK
        assert await channel.unary_unary("/conductor.v1.Nowhere/At")(b"", timeout=60).code() == (
            grpc.StatusCode.UNIMPLEMENTED
        )
        assert not api.dispatcher.requests
        assert [part async for part in inference_pb2_grpc.InferenceStub(channel).Generate(GENERATE(text="x"))]


def http2_frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def http2_field(name, value):
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


@contextlib.asynccontextmanager
async def trickling(port, num_calls):
    """The reader of a connection on which so many calls have sent a part of their messages."""
    fields = {b":path": b"/conductor.v1.Inference/Generate", b":authority": b"x", b"te": b"trailers"}
    fields[b"content-type"] = b"application/grpc"
    head = b"\x83\x86" + b"".join(itertools.starmap(http2_field, fields.items()))  # POST, http
    begun = b"\0" + (1000).to_bytes(4) + b"x"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0, b""))
        for stream in range(1, 2 * num_calls, 2):
            writer.write(http2_frame(1, 4, stream, head) + http2_frame(0, 0, stream, begun))
        async with asyncio.timeout(60):
            yield reader
    finally:
        writer.close()


async def test_a_grpc_message_that_trickles_in_ends_its_call(model, monkeypatch):
    monkeypatch.setattr(rpc, "MESSAGE_TIMEOUT_S", 0.05)
    async with serving(model, lambda request: []) as api, trickling(api.ports.grpc_port, 1) as reader:
        await reader.readuntil(b"the message took longer than")
        assert not api.dispatcher.requests


async def test_of_grpc_messages_that_trickle_in_the_oldest_gives_way_to_one_too_many(model, monkeypatch):
    """Each may hold the bytes of a message of the greatest length, which nobody counts before its end."""
    monkeypatch.setattr(rpc, "MAX_SLOW_MESSAGES", 3)
    async with serving(model, lambda request: []) as api, trickling(api.ports.grpc_port, 5) as reader:
        ended = []
        while len(ended) < 2:
            head = await reader.readexactly(9)
            said = await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == 1:
                assert b"3 messages are slow already" in said
                ended.append(int.from_bytes(head[5:]))
        assert ended == [1, 3]
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)).models


async def test_bytes_that_are_no_http2_are_cut_off(model):
    async with serving(model, lambda request: spoken(model, "hi")) as api:
        for sent in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 5_000,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5_000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.grpc_port)
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                async with asyncio.timeout(60):
                    await reader.read()
            writer.close()
        async with grpc.aio.insecure_channel(api.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)).models


async def refused(address, sent):
    """Send one message as a node would; return what comes back until the connection ends."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            while part := await reader.read(1 << 16):
                answer += part
    except ConnectionResetError:
        pass  # it is closed with what it has not read
    finally:
        writer.close()
    return answer


def framed(message):
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def registered(**fields):
    return nodes_pb2.NodeMessage(register=nodes_pb2.Register(**fields)).SerializeToString()


HOSTILE_NODES = {
    "nothing": b"",
    "noise": b"\xff" * 100,
    "no registration": nodes_pb2.NodeMessage(heartbeat=nodes_pb2.Heartbeat(sequence=1)).SerializeToString(),
    "an empty registration": registered(),
    "no name": registered(node_id="", epoch=1, protocol_version=1),
    "another protocol": registered(node_id="x", epoch=1, protocol_version=99),
    "another model": registered(node_id="x", epoch=1, model_id="other", protocol_version=1),
    "a role that is none": registered(node_id="x", epoch=1, roles=["root"]),
    "no blocks": registered(node_id="x", epoch=1, num_blocks=0, block_size=16),
    "more blocks than there is memory": registered(node_id="x", epoch=2**63, num_blocks=2**31 - 1),
    "a name without end": registered(node_id="x" * 2**20, epoch=1),
    "an endpoint that is none": registered(node_id="x", epoch=1, host="\0" * 100),
}


HOSTILE_LINKS = {
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01" + b"\0" * 100,
    "a length without end": b"\xff" * 5_000,
}


async def test_no_message_of_a_node_harms_the_others():
    async with conductor() as running:
        await running.attach(ScriptedWork())
        sent = {name: framed(message) for name, message in HOSTILE_NODES.items()} | HOSTILE_LINKS
        for name, message in sent.items():
            answer = await cheaply(name, partial(refused, running.address, message))
            if answer:
                assert nodes_pb2.ConductorMessage.FromString(answer[LENGTH_BYTES:]).refused, name
            assert len(running.membership.sessions) == 1, name
        assert running.membership.sessions[0].info.node_id != "x"


async def test_a_node_that_says_half_a_message_and_no_more_is_let_go_after_the_lease():
    with patch.object(dispatching, "LEASE", replace(dispatching.LEASE, lease_s=1.0)):
        async with conductor() as running:
            assert await refused(running.address, framed(registered(node_id="x"))[:-1]) == b""
