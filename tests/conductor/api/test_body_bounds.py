"""A body of too many parts is refused by counts of its bytes, before anything is made of it."""

import json
import threading
import tracemalloc
from contextlib import suppress

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from base import rpc
from base.errors import InvalidRequestError
from base.message_bounds import MAX_FIELDS
from base.off_loop import INLINE_BYTES
from conductor.api import service
from conductor.api.body_bounds import (
    MAX_BARE_BYTES,
    MAX_CONTAINERS,
    MAX_MEMBERS,
    MAX_TEXTS,
    MAX_VALUES,
    check_structure,
    structure,
)
from conductor.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from conductor.api.service import MAX_ELEMENTS
from conductor.api.text_stream import TextStream
from conductor.api.tokenizer import Detokenizer, Tokenizer
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from protos.inference_pb2_grpc import InferenceStub
from tests.base.test_message_bounds import HOSTILE
from tests.conductor.fakes import MAX_MODEL_LEN, MODEL, byte_level_tokenizer, serving, spoken
from tests.memory import kept_bytes

MIB = 1 << 20
MANY = {
    "values": (b"1,", MAX_VALUES, "values"),
    "texts": (b'"a",', MAX_TEXTS, "texts"),
    "lists": (b"[],", MAX_CONTAINERS, "lists and objects"),
    "objects": (b"{},", MAX_CONTAINERS, "lists and objects"),
    "fields": (b'{"a":1,"b":2,"c":3},', MAX_MEMBERS // 3, "fields"),
}


def listed(item: bytes, count: int) -> bytes:
    return b'{"x":[' + (item * count)[:-1] + b"]}"


@pytest.mark.parametrize("kind", MANY)
async def test_more_parts_than_any_request_has_are_refused_and_named(kind):
    item, limit, words = MANY[kind]
    await check_structure(listed(item, limit - 2))
    with pytest.raises(InvalidRequestError, match=words):
        await check_structure(listed(item, limit + 2))


@pytest.mark.parametrize("item", [b"7" * 4_300 + b",", b"1." + b"0" * 800 + b",", b" " * 5_000 + b"1,"])
async def test_long_numbers_are_bounded_by_their_bytes_beside_texts(item):
    count = MAX_BARE_BYTES // len(item)
    await check_structure(listed(item, count - 1))
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_BARE_BYTES} bytes beside its texts"):
        await check_structure(listed(item, count + 1))
    await check_structure(b'{"prompt":"%b"}' % (item * (count + 1)))


async def test_marks_within_texts_are_no_parts_of_a_body():
    text = '{[:,"\\' * (MAX_VALUES + 1)
    await check_structure(json.dumps({"prompt": text, "é": "\\"}).encode())


@given(
    st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_the_count_of_the_bytes_is_at_least_that_of_the_parts(value):
    def parts(value) -> tuple[int, int, int]:
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        below = [sum(column) for column in zip(*map(parts, inside), (0, 0, 0), strict=True)]
        commas = below[0] + max(0, len(inside) - 1)
        return (
            commas,
            below[1] + isinstance(value, dict) * len(inside),
            below[2] + isinstance(value, list | dict),
        )

    found = structure(json.dumps(value).encode())
    assert all(count >= least for count, least in zip(found, parts(value), strict=True))


LISTS = {
    "messages": (ChatBody, b'{"model":"tiny","messages":[%s]}', "messages[0]"),
    "content": (
        ChatBody,
        b'{"model":"tiny","messages":[{"role":"user","content":[%s]}]}',
        "messages[0].content[0]",
    ),
    "stop": (ChatBody, b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"stop":[%s]}', "stop[0]"),
    "stop_token_ids": (
        CompletionBody,
        b'{"model":"tiny","prompt":"a","stop_token_ids":[%s]}',
        "stop_token_ids[0]",
    ),
    "prompt": (CompletionBody, b'{"model":"tiny","prompt":[%s]}', "prompt"),
    "tokens": (DetokenizeBody, b'{"tokens":[%s]}', "tokens[0]"),
    "messages to tokenize": (TokenizeBody, b'{"messages":[%s]}', "messages[0]"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_wrong_values_is_left_at_the_first(name):
    body, text, param = LISTS[name]
    raw = text % b",".join([b"true"] * 50_000)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError) as refused:
        read_body(raw, body)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.param == param
    assert peak_bytes < 10 * len(raw)


def test_a_table_of_wrong_biases_is_left_as_a_whole():
    table = ",".join(f'"{token_id}":"x"' for token_id in range(30_000))
    with pytest.raises(InvalidRequestError, match="at most 1024 tokens, not 30000") as refused:
        read_body(f'{{"model":"tiny","prompt":"a","logit_bias":{{{table}}}}}'.encode(), CompletionBody)
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": [-1], "echo": True}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [1 << 40], "echo": True}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * 2 * MAX_MODEL_LEN, "echo": True}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, "tokens"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "x": [[]] * (MAX_CONTAINERS + 1)}, None),
    ],
    ids=["echo of -1", "echo of a large id", "echo of many", "text of -1", "text of many", "unknown lists"],
)
async def test_ids_are_checked_before_they_are_decoded(model, path, body, param):
    async with (
        serving(model, lambda request: spoken(model, "no")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_stop_strings_cost_no_memory_for_each_choice():
    tokenizer = Tokenizer(byte_level_tokenizer())
    stop = tuple(chr(97 + number) * 256 for number in range(16))
    streams, num_bytes = kept_bytes(
        lambda: [TextStream(Detokenizer(tokenizer), stop) for _ in range(128)], __file__
    )
    assert len(streams) * 1024 > num_bytes > 0


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_client_is_refused_before_its_message_is_parsed(model, name):
    async with (
        serving(model, lambda request: spoken(model, "no"), max_body_mib=2) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = channel.unary_stream("/conductor.v1.Inference/Generate")(HOSTILE[name])
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"more than {MAX_FIELDS} fields" in await call.details()
        assert not api.dispatcher.requests


MESSAGES = {
    "text": lambda text: pb.GenerateRequest(text=text),
    "role": lambda text: pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role=text)])),
    "model": lambda text: pb.GenerateRequest(text="a", model=text),
    "cache_salt": lambda text: pb.GenerateRequest(text="a", cache_salt=text),
}


@pytest.mark.parametrize("num_chars", [10, INLINE_BYTES])
@pytest.mark.parametrize("name", MESSAGES)
async def test_a_long_message_is_parsed_and_its_texts_are_made_off_the_event_loop(
    model, monkeypatch, name, num_chars
):
    """Nothing of the message itself leaves the thread that parses it: all that is read there are values."""
    read, threads = service._said, []

    def said(data):
        threads.append(threading.get_ident())
        found = read(data)
        assert not any(isinstance(value, pb.GenerateRequest | pb.ChatMessages | pb.Slo) for value in found)
        return found

    monkeypatch.setattr(service, "_said", said)
    async with (
        serving(model, lambda request: spoken(model, "no")) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        with suppress(grpc.aio.AioRpcError):
            async for _ in InferenceStub(channel).Generate(MESSAGES[name]("a" * num_chars), timeout=60):
                pass
    (thread,) = threads
    assert (thread == threading.get_ident()) == (num_chars < INLINE_BYTES)


async def test_a_long_message_of_another_service_is_parsed_off_the_event_loop(monkeypatch):
    parse, threads = rpc.parsed, []

    def parsed(data, kind):
        threads.append(threading.get_ident())
        return parse(data, kind)

    monkeypatch.setattr(rpc, "parsed", parsed)
    servicer = pb_grpc.InferenceServicer()
    plain = rpc.Service(
        service.NAME, lambda server: pb_grpc.add_InferenceServicer_to_server(servicer, server)
    )
    server, port, _ = await rpc.start_server([plain], lambda: True, rpc.Port("127.0.0.1:0"), 2 * MIB)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for num_chars in (10, INLINE_BYTES):
            call = InferenceStub(channel).Generate(pb.GenerateRequest(text="a" * num_chars), timeout=60)
            assert await call.code() is not grpc.StatusCode.OK
    await server.stop(None)
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


LONG = {
    "stop.token_ids": pb.GenerateRequest(text="a", stop=pb.Stop(token_ids=range(5_000))),
    "stop.strings": pb.GenerateRequest(text="a", stop=pb.Stop(strings=["a"] * 2_000)),
    "sampling.logit_bias": pb.GenerateRequest(
        text="a", sampling=pb.Sampling(logit_bias=dict.fromkeys(range(2_000), 1.0))
    ),
    "chat.messages": pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 3_000)),
}


@pytest.mark.parametrize("name", LONG)
async def test_a_long_list_of_a_message_is_refused_by_its_length_and_named(model, name):
    async with (
        serving(model, lambda request: spoken(model, "no")) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = InferenceStub(channel).Generate(LONG[name])
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{name}: at most {MAX_ELEMENTS[name]} elements" in await call.details()


@pytest.mark.parametrize("method", ["Health/Check", "ServerReflection/ServerReflectionInfo"])
async def test_a_message_to_grpcs_own_services_is_short(model, method):
    path = f"/grpc.health.v1.{method}" if "Health" in method else f"/grpc.reflection.v1alpha.{method}"
    async with (
        serving(model, lambda request: spoken(model, "no"), max_body_mib=2) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        make = channel.unary_stream if "Health" in method else channel.stream_stream
        data = b"\xf8\x07\x01" * MAX_FIELDS
        call = make(path)(data if "Health" in method else iter([data]))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes; at most" in await call.details()
