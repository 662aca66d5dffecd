# ruff: noqa: E501  (bodies are not broken)
"""A client that leaves a stream after any of its events, whatever the API, leaves nothing behind."""

import asyncio
import json

import grpc
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.conductor.api.conversing import CALL
from tests.conductor.fakes import MODEL, serving, spoken

NUM_EVENTS = 24
QUESTION = [{"role": "user", "content": "1 + 2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANSWER = f"Sum.</think>I add.\n{CALL}\n{CALL}"
DEMANDED = '[{"name": "add", "arguments": {"a": 12'
CHAT = {"messages": QUESTION, "tools": TOOLS, "reasoning_effort": "low"}
STREAMS = {
    "completion": ("/v1/completions", {"prompt": "a"}, "hi you"),
    "chat": ("/v1/chat/completions", CHAT, ANSWER),
    "chat of two": ("/v1/chat/completions", {**CHAT, "n": 2}, ANSWER),
    "chat beyond its budget": ("/v1/chat/completions", {**CHAT, "thinking_token_budget": 2}, "one two three"),
    "demanded call": ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, DEMANDED),
    "response": ("/v1/responses", {"input": "1 + 2?", "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "low"}}, ANSWER),
    "message": ("/v1/messages", {"messages": QUESTION, "max_tokens": 500, "tools": [{"name": "add", "input_schema": SCHEMA}], "thinking": {"type": "adaptive"}}, ANSWER),
}  # fmt: skip


def endless(model, text):
    """A model that says `text`, and then the same digit for ever: it is the client that ends the stream."""

    def script(request):
        yield from spoken(model, text, per_step=4)[:-1]
        while True:
            yield spoken(model, "1")[0]

    return script


async def opened(api, path, fields):
    reader, writer = await asyncio.open_connection("127.0.0.1", api.ports.http_port)
    body = json.dumps({"model": MODEL, "stream": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert b" 200 " in await reader.readline()
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def idle(api):
    await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
    async with asyncio.timeout(60):
        await api.completions.wait_idle()


@pytest.mark.parametrize("name", STREAMS)
async def test_leaving_after_any_event_cancels(tooled, name):
    path, fields, text = STREAMS[name]
    async with serving(tooled, endless(tooled, text)) as api:
        for num_events in range(NUM_EVENTS):
            reader, writer = await opened(api, path, fields)
            for _ in range(num_events):
                assert b'"error":{' not in await reader.readuntil(b"\n\n")
            writer.transport.abort()
            await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
            async with asyncio.timeout(60):
                await api.completions.wait_idle()
        assert api.dispatcher.num_cancelled == len(api.dispatcher.requests) >= NUM_EVENTS
        assert (name == "chat beyond its budget") == any(
            request.request_id.endswith("-r") for request in api.dispatcher.requests
        )


async def test_a_grpc_client_that_leaves_after_any_response_cancels(tooled):
    tools = [pb.Tool(name="add", parameters=json.dumps(SCHEMA))]
    messages = [pb.ChatMessage(role="user", content="1 + 2?")]
    chat = pb.ChatMessages(messages=messages, tools=tools, reasoning=pb.Reasoning(effort="low"))
    async with (
        serving(tooled, endless(tooled, ANSWER)) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        for num_events in range(NUM_EVENTS):
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat))
            for _ in range(num_events):
                await call.read()
            await api.dispatcher.until(
                lambda dispatcher, first=num_events + 1: len(dispatcher.requests) == first
            )
            call.cancel()
            await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
            await api.completions.wait_idle()
        assert api.dispatcher.num_cancelled == len(api.dispatcher.requests) == NUM_EVENTS
