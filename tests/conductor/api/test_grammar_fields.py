"""Every way to ask for a form of the answer, over HTTP and gRPC, and what is said of a bad one."""

import json
import tracemalloc
from contextlib import asynccontextmanager
from math import inf, nan

import grpc
import httpx
import pytest

from base.errors import InvalidRequestError
from base.request import Grammar, GrammarKind
from conductor.api.grammar_fields import JSON_OBJECT, choice_grammar, json_schema
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.conductor.fakes import MODEL, serving, spoken

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
BY_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, TEXT)
REGEX = Grammar(GrammarKind.REGEX, "[ab]+")
LARK = Grammar(GrammarKind.LARK, 'start: "a" | "b"')
CHOICE = Grammar(GrammarKind.LARK, 'start: "a" | "b é\\n"')
RESPONSE_SCHEMA = "response_format.json_schema.schema"

ASKED = [
    ({"response_format": {"type": "json_object"}}, JSON_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, BY_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, BY_SCHEMA),
    ({"structured_outputs": {"regex": "[ab]+"}}, REGEX),
    ({"structured_outputs": {"choice": ["a", "b é\n"]}}, CHOICE),
    ({"structured_outputs": {"grammar": LARK.source, "disable_any_whitespace": True}}, LARK),
    ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_regex": "[ab]+"}, REGEX),
    ({"guided_choice": ["a", "b é\n"]}, CHOICE),
    ({"guided_grammar": LARK.source, "response_format": {"type": "text"}}, LARK),
]
REFUSED = [
    ({"response_format": {"type": "json_schema"}}, RESPONSE_SCHEMA, "is missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "Input should be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "horse"}}}},
        RESPONSE_SCHEMA,
        "Invalid type: horse",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", 'unknown name: "x"'),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "null"),
    ({"guided_json": '{"type":'}, "guided_json", "EOF"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "NoExtension"),
    ({"guided_json": {"enum": [1e300, 0, 0] * 33_000}}, "guided_json", "at most 131072 characters"),
    ({"guided_json": {"enum": ["a" * 200_000]}}, "guided_json", "at most 131072 characters"),
    ({"guided_regex": "a" * 200_000}, "guided_regex", "at most"),
    ({"guided_choice": ["a" * 100_000] * 2}, "guided_choice", "at most 131072 characters, not 200000"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex"),
]


@asynccontextmanager
async def asking(model):
    async with (
        serving(model, lambda request: spoken(model, "a")) as api,
        httpx.AsyncClient(base_url=api.url, timeout=60) as client,
    ):
        yield api, client


async def test_every_way_to_ask_for_a_form_is_one_grammar(model):
    async with asking(model) as (api, client):
        for at, (fields, grammar) in enumerate(ASKED):
            body = (
                {"model": MODEL, "prompt": "x", **fields}
                if at % 2
                else {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
            )
            answer = await client.post("/v1/completions" if at % 2 else "/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert api.dispatcher.requests[-1].sampling.grammar == grammar
        assert api.completions.grammars.num_tried == len({grammar for _, grammar in ASKED})


async def test_a_bad_grammar_is_refused_with_what_is_wrong_and_where_before_any_node_hears_of_it(model):
    async with asking(model) as (api, client):
        for fields, param, words in REFUSED:
            for stream in (False, True):
                answer = await client.post(
                    "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": stream, **fields}
                )
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), answer.text
                assert words in error["message"]
        assert not api.dispatcher.requests


async def test_an_answer_of_a_form_ends_where_it_is_complete_whoever_ignores_the_end(model):
    async with asking(model) as (api, client):
        for fields in ({}, {"guided_regex": "a"}):
            await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "x", "ignore_eos": True, **fields}
            )
        free, formed = api.dispatcher.requests
    assert not free.stop.stop_token_ids
    assert formed.stop.stop_token_ids == model.eos_token_ids


async def test_all_choices_of_a_call_have_the_grammar_and_it_is_tried_once(model):
    async with asking(model) as (api, client):
        answer = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "n": 4, "guided_regex": "[ab]+"}
        )
        assert len(answer.json()["choices"]) == 4
        assert [request.sampling.grammar for request in api.dispatcher.requests] == [REGEX] * 4
        assert api.completions.grammars.num_tried == 1


async def test_grpc_has_the_same_forms(model):
    forms = [
        (pb.Grammar(json_schema=TEXT), BY_SCHEMA),
        (pb.Grammar(regex="[ab]+"), REGEX),
        (pb.Grammar(lark=LARK.source), LARK),
        (pb.Grammar(choices=pb.Choices(texts=["a", "b é\n"])), CHOICE),
    ]
    async with (
        serving(model, lambda request: spoken(model, "a")) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        stub = InferenceStub(channel)

        async def ask(grammar):
            request = pb.GenerateRequest(text="x", sampling=pb.Sampling(grammar=grammar))
            return [response async for response in stub.Generate(request)]

        for given, grammar in forms:
            assert await ask(given)
            assert api.dispatcher.requests[-1].sampling.grammar == grammar
        for given in (
            pb.Grammar(),
            pb.Grammar(regex="(a"),
            pb.Grammar(choices=pb.Choices(texts=["a"] * 5000)),
            pb.Grammar(choices=pb.Choices(texts=["a" * 200_000])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(given)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "grammar" in refused.value.details()
        assert len(api.dispatcher.requests) == len(forms)


@pytest.mark.parametrize("number", [inf, -inf, nan])
def test_a_schema_says_nothing_that_json_cannot(number):
    assert json_schema({"const": "NaN or Infinity"}).source == '{"const":"NaN or Infinity"}'
    with pytest.raises(ValueError, match="Out of range"):
        json_schema({"const": number})


def test_choices_that_are_too_long_are_refused_without_a_copy():
    texts = ["a", "\N{GRINNING FACE}" * 1_000_000]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="at most"):
            choice_grammar(texts, "guided_choice")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


async def test_a_schema_keeps_the_order_of_its_properties(model):
    names = [f"{letter}{number}" for number in range(3) for letter in "zam"]
    schema = {"type": "object", "properties": {name: {} for name in names}}
    async with asking(model) as (api, client):
        await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "guided_json": schema})
    grammar = api.dispatcher.requests[0].sampling.grammar
    assert list(json.loads(grammar.source)["properties"]) == names
