"""What a conversation is made of is looked at off the event loop, whatever API it comes by.

Each value of a schema or of a call's arguments, and each call, is worth some lines; so few ran on this thread
that they were none of them.
"""

import json

import grpc
import httpx
import pytest

from conductor.api.served_model import load_served_model
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.conductor.api.conversing import WITH_TOOLS, long_model, talking
from tests.conductor.fakes import MODEL
from tests.effort import counting

MAX_LINES = 30_000
"""What client and server run for a short call is a tenth of it."""
USER = {"role": "user", "content": "1 + 2?"}
MANY = {"type": "object", "properties": {"a": {"enum": [0] * 60_000}}}
FUNCTION = {"name": "add", "parameters": MANY}
ARGUMENTS = json.dumps({"a": [0] * 60_000})
ASKED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": ARGUMENTS}}],
}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}] * 100,
}
CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
USE = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": [0] * 60_000}}
TOOL = {"type": "function", "function": FUNCTION}
BODIES = {
    "chat, schema": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    "chat, demanded": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    ),
    "chat, arguments": ("/v1/chat/completions", {"messages": [USER, ASKED]}),
    "chat, calls": ("/v1/chat/completions", {"messages": [USER, *[CALLS] * 50]}),
    "chat, variables": (
        "/v1/chat/completions",
        {"messages": [USER], "chat_template_kwargs": {"a": [0] * 60_000}},
    ),
    "tokenize": ("/tokenize", {"messages": [USER], "tools": [TOOL]}),
    "response, schema": ("/v1/responses", {"input": "1 + 2?", "tools": [{"type": "function", **FUNCTION}]}),
    "response, arguments": ("/v1/responses", {"input": [USER, {**CALL_ITEM, "arguments": ARGUMENTS}]}),
    "response, calls": ("/v1/responses", {"input": [USER, *[CALL_ITEM] * 2_000]}),
    "message, schema": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [USER], "tools": [{"name": "add", "input_schema": MANY}]},
    ),
    "message, input": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": [USE]}]},
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_long_conversation_takes_little_of_the_event_loop(tooled, name):
    path, fields = BODIES[name]
    async with talking(tooled, "3") as api, httpx.AsyncClient(timeout=60) as client:
        short = await client.post(f"{api.url}/tokenize", json={"model": MODEL, "messages": [USER]})
        assert short.status_code == 200
        raw = json.dumps({"model": MODEL, **fields}).encode()
        with counting() as effort:
            answer = await client.post(api.url + path, content=raw)
        assert answer.status_code in (200, 400)
        assert effort.lines < MAX_LINES


async def test_a_response_that_is_held_is_counted_off_the_event_loop(tmp_path):
    long_model(tmp_path, WITH_TOOLS)
    table = {"max_position_embeddings": 1 << 17, "vocab_size": 263, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(table))
    arguments = json.dumps({"a": [0] * 9_000}, indent=8)
    items = [USER, {**CALL_ITEM, "arguments": arguments}]
    async with (
        talking(load_served_model(tmp_path, MODEL, ""), "3") as api,
        httpx.AsyncClient(timeout=60) as client,
    ):
        with counting() as effort:
            answer = await client.post(f"{api.url}/v1/responses", json={"model": MODEL, "input": items})
        assert answer.status_code == 200
        assert effort.lines < MAX_LINES
        more = {"previous_response_id": answer.json()["id"], "input": "4?"}
        assert (
            await client.post(f"{api.url}/v1/responses", json={"model": MODEL, **more})
        ).status_code == 200


async def test_the_members_of_a_schema_over_grpc_are_bounded_by_the_window(tooled):
    schema = json.dumps({f"x{number}": 0 for number in range(1_100)})
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="1 + 2?")],
        tools=[pb.Tool(name="add", parameters=schema)],
    )
    async with talking(tooled, "3") as api, grpc.aio.insecure_channel(api.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "context length" in await call.details()


async def test_a_schema_that_no_json_could_be_is_refused_by_its_name(tooled):
    deep = {"type": "object", "properties": {}}
    for _ in range(60):
        deep = {"type": "object", "properties": {"x": deep}}
    fields = {
        "/v1/chat/completions": {
            "messages": [USER],
            "tools": [{**TOOL, "function": {"name": "f", "parameters": deep}}],
        },
        "/v1/responses": {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": deep}]},
        "/v1/messages": {"max_tokens": 5, "messages": [USER], "tools": [{"name": "f", "input_schema": deep}]},
    }
    names = []
    async with talking(tooled, "3") as api, httpx.AsyncClient(timeout=60) as client:
        for path, said in fields.items():
            answer = await client.post(api.url + path, json={"model": MODEL, **said})
            assert answer.status_code == 400
            names.append(answer.json()["error"]["message"])
    assert names == [
        "tools[0].function.parameters: at most 100 levels",
        "tools[0].parameters: at most 100 levels",
        "tools[0].input_schema: at most 100 levels",
    ]
