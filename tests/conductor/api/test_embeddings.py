"""Vectors of texts: as OpenAI's client has them, in the order of the inputs, bounded, and fairly."""

import asyncio
import base64
import json
import math
import re
from array import array
from contextlib import suppress
from dataclasses import replace

import grpc
import httpx
import openai
import pytest

from base.errors import ConfigError, LostError, RejectedError
from base.metrics import samples_of
from base.request import FinishReason, Pooling
from conductor.api.embeddings.batch import MAX_NUMBERS, WINDOW, unit_vector
from conductor.api.embeddings.generation import MAX_INPUTS
from conductor.api.embeddings.rule import EmbeddingRule, embedding_rule
from conductor.api.keys import KeyFile, Quota, change_keys, made_key
from conductor.serving.generated import Generated
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from tests.conductor.fakes import MODEL, WAIT, serving

DIMENSIONS = 4


@pytest.fixture
def vectored(model):
    """The tiny model, of which vectors are made."""
    return replace(model, embedding=EmbeddingRule(Pooling.LAST, hidden_size=DIMENSIONS))


def vector_of(token_ids):
    return [float(len(token_ids)), float(token_ids[0]), 1.0, -2.0]


def embed(request):
    vector = array("f", vector_of(request.token_ids)).tobytes()
    return [Generated((), FinishReason.STOP, 3, embedding=vector)]


def unit(numbers):
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def client_of(api):
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


async def post(api, **body):
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{api.url}/v1/embeddings", json={"model": MODEL, **body})


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_each_text_has_its_vector_of_length_one_in_the_order_given(vectored, encoding):
    texts = ["hello", "a", "hello world"]
    async with serving(vectored, embed) as api, client_of(api) as client:
        named = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model=MODEL, input=texts, **named)
    given = [vectored.tokenizer.encode(text, True) for text in texts]
    for place, (row, token_ids) in enumerate(zip(answer.data, given, strict=True)):
        numbers = row.embedding
        if encoding == "base64":
            numbers = array("f", base64.b64decode(numbers)).tolist()
        assert row.index == place
        assert numbers == pytest.approx(unit(vector_of(token_ids)), abs=1e-7)
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, given))
    assert {request.pooling for request in api.dispatcher.requests} == {Pooling.LAST}
    assert len({request.request_id for request in api.dispatcher.requests}) == 3


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7]], [[5, 6, 7], [8]]])
async def test_token_ids_are_taken_as_they_are(vectored, given):
    async with serving(vectored, embed) as api:
        answer = (await post(api, input=given)).json()
    assert api.dispatcher.requests[0].token_ids == (5, 6, 7)
    assert answer["data"][0]["embedding"] == pytest.approx(unit([3.0, 5.0, 1.0, -2.0]))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 * len(answer["data"])}


async def test_fewer_dimensions_are_the_first_ones_brought_to_length_one(vectored):
    async with serving(vectored, embed) as api, client_of(api) as client:
        answer = await client.embeddings.create(model=MODEL, input=[7, 8], dimensions=2)
    assert answer.data[0].embedding == pytest.approx(unit([2.0, 7.0]))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [[5], ["a"]]}, "input"),
        ({"input": [5, True]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [5, -1]}, "input"),
        ({"input": [[5], [999_999]]}, "input[1]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": ["a", "b" * 5_000]}, "input[1]"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "cache_salt": "s" * 257}, "cache_salt"),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field(vectored, body, param):
    async with serving(vectored, embed) as api:
        refused = await post(api, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert api.completions.places.num_taken == 0


async def test_more_numbers_than_an_answer_may_have_are_refused(model):
    wide = replace(model, embedding=EmbeddingRule(Pooling.LAST, hidden_size=MAX_NUMBERS))
    async with serving(wide, embed) as api:
        refused = await post(api, input=["a", "b"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert not api.dispatcher.requests


async def test_a_model_without_vectors_says_why(model):
    other = replace(model, embedding=EmbeddingRule(None, "it looks ahead"))
    async with serving(other, embed) as api:
        refused = await post(api, input="a")
    assert refused.status_code == 400
    assert "it looks ahead" in refused.json()["error"]["message"]


async def test_only_some_inputs_of_a_call_are_under_way_at_once(vectored):
    most = []

    def script(request):
        most.append((api.dispatcher.num_open, api.completions.places.num_taken))
        return embed(request)

    async with serving(vectored, script, max_calls=WINDOW) as api:
        answer = await post(api, input=["a"] * (5 * WINDOW))
        assert len(answer.json()["data"]) == 5 * WINDOW
        assert max(most) == (WINDOW, WINDOW)
        assert api.completions.places.num_taken == 0


async def test_more_than_there_are_places_for_are_turned_away(vectored):
    async with serving(vectored, embed, max_calls=WINDOW - 1) as api:
        refused = await post(api, input=["a"] * WINDOW)
        assert refused.status_code == 429
        assert api.completions.places.num_taken == 0


async def test_one_that_fails_fails_the_call_and_gives_up_the_others(vectored):
    def script(request):
        if request.token_ids == (9,):
            return [LostError("no node is left")]
        return [WAIT]

    async with serving(vectored, script) as api:
        refused = await post(api, input=[[5], [6], [9]])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "lost")
        await api.dispatcher.until(lambda dispatcher: not dispatcher.num_open)
        assert api.dispatcher.num_cancelled == 2


async def test_a_client_that_leaves_takes_its_inputs_with_it(vectored):
    async with serving(vectored, lambda request: [WAIT]) as api:
        asking = asyncio.ensure_future(post(api, input=["a", "b"]))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 2)
        asking.cancel()
        await api.dispatcher.until(lambda dispatcher: not dispatcher.num_open)
        assert api.dispatcher.num_cancelled == 2


async def test_they_are_counted_apart_from_tokens(vectored):
    def script(request):
        return [RejectedError("not now")] if request.token_ids == (9,) else embed(request)

    async with serving(vectored, script) as api:
        await post(api, input=[[5, 6], [7]])
        assert (await post(api, input=[9])).status_code == 429
        text = await api.metrics()
    found = {name: value for name, labels, value in samples_of(text) if not labels}
    assert found["conductor_embedding_seconds_count"] == found["conductor_good_sequences_total"] == 2
    assert found["conductor_prompt_tokens_total"] == 3
    assert found["conductor_cached_tokens_total"] == 6
    assert found["conductor_ttft_seconds_count"] == found["conductor_generation_tokens_total"] == 0
    assert found["conductor_running_sequences"] == 0


@pytest.mark.parametrize(
    "numbers", [[0.0] * DIMENSIONS, [math.nan] * DIMENSIONS, [math.inf] * DIMENSIONS, [1.0]]
)
async def test_what_is_no_vector_is_not_sent(vectored, numbers):
    def script(request):
        return [Generated((), FinishReason.STOP, 0, embedding=array("f", numbers).tobytes())]

    async with serving(vectored, script) as api:
        failed = await post(api, input="a")
    assert failed.status_code == 500


def test_a_vector_of_large_numbers_has_length_one():
    numbers = array("f", unit_vector(array("f", [3e38, 3e38]).tobytes(), 2))
    assert numbers.tolist() == pytest.approx([math.sqrt(0.5)] * 2)


POOLED = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
POOLED += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
NORMALIZED = [*POOLED, {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]
CONFIG = {"hidden_size": 8}


def write(folder, modules, pooling):
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("modules", "pooling", "found"),
    [
        (POOLED, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        (NORMALIZED, {"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        (NORMALIZED, {"pooling_mode_weightedmean_tokens": True}, Pooling.WEIGHTED_MEAN),
        (NORMALIZED, {"pooling_mode": "lasttoken"}, Pooling.LAST),
        (NORMALIZED, {"pooling_mode": ["mean"]}, Pooling.MEAN),
    ],
)
def test_the_models_folder_says_how_tokens_are_pooled(tmp_path, modules, pooling, found):
    write(tmp_path, modules, pooling)
    assert embedding_rule(tmp_path, CONFIG) == EmbeddingRule(found, hidden_size=8)


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        (POOLED, {"pooling_mode_cls_token": True}, "'cls'"),
        (POOLED, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "'mean+max'"),
        (POOLED, {}, "pooling is ''"),
        ([*NORMALIZED, {"type": "models.Dense", "path": "2_Dense"}], {"pooling_mode": "mean"}, "'Dense'"),
    ],
)
def test_what_a_model_wants_and_is_not_done_is_named(tmp_path, modules, pooling, reason):
    write(tmp_path, modules, pooling)
    rule = embedding_rule(tmp_path, CONFIG)
    assert rule.pooling is None
    assert reason in rule.refusal


def test_a_folder_that_says_nothing_has_the_last_tokens_state(tmp_path):
    assert embedding_rule(tmp_path, CONFIG) == EmbeddingRule(Pooling.LAST, hidden_size=8)
    assert embedding_rule(tmp_path, {}).pooling is None
    assert "look ahead" in embedding_rule(tmp_path, CONFIG | {"is_causal": False}).refusal


@pytest.mark.parametrize("modules", ["{", '{"a": 1}', "[1]"])
def test_modules_that_cannot_be_read_are_an_error_of_the_folder(tmp_path, modules):
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        embedding_rule(tmp_path, CONFIG)


async def embedded(stub, **fields):
    inputs = [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in fields.pop("inputs", [])
    ]
    return [response async for response in stub.Embed(pb.EmbedRequest(inputs=inputs, **fields))]


async def test_grpc_streams_a_vector_for_each_input_in_order(vectored):
    async with serving(vectored, embed) as api, grpc.aio.insecure_channel(api.grpc_address) as channel:
        stub = InferenceStub(channel)
        found = await embedded(stub, inputs=["hello", [5, 6]], request_id="mine", dimensions=3)
    given = [vectored.tokenizer.encode("hello", True), (5, 6)]
    for place, (response, token_ids) in enumerate(zip(found, given, strict=True)):
        assert (response.request_id, response.index) == ("mine", place)
        assert list(response.embedding) == pytest.approx(unit(vector_of(token_ids)[:3]))
        assert response.HasField("usage") == (place == 1)
    assert found[1].usage.prompt_tokens == len(given[0]) + 2
    assert (found[1].usage.completion_tokens, found[1].usage.cached_tokens) == (0, 6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "inputs"),
        ({"inputs": ["a"] * (MAX_INPUTS + 1)}, "inputs"),
        ({"inputs": ["a", ""]}, "the prompt is empty"),
        ({"inputs": ["a"], "dimensions": 0}, "dimensions"),
        ({"inputs": ["a"], "dimensions": 9}, "dimensions"),
        ({"inputs": ["a"], "slo": pb.Slo(ttft_s=-1.0)}, "slo.ttft_s"),
    ],
)
async def test_grpc_refuses_by_the_name_of_the_field(vectored, fields, param):
    async with serving(vectored, embed) as api, grpc.aio.insecure_channel(api.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(param)) as caught:
            await embedded(InferenceStub(channel), **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_grpc_names_an_input_of_nothing(vectored):
    async with serving(vectored, embed) as api, grpc.aio.insecure_channel(api.grpc_address) as channel:
        asked = pb.EmbedRequest(inputs=[pb.EmbedInput(text="a"), pb.EmbedInput()])
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[1\]: one of text and token_ids"):
            _ = [response async for response in InferenceStub(channel).Embed(asked)]


async def test_a_grpc_client_that_leaves_takes_its_inputs_with_it(vectored):
    async with (
        serving(vectored, lambda request: [WAIT]) as api,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        call = InferenceStub(channel).Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 3))
        reading = asyncio.ensure_future(call.read())
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 3)
        call.cancel()
        await api.dispatcher.until(lambda dispatcher: not dispatcher.num_open)
        with suppress(asyncio.CancelledError):
            await reading
        assert api.dispatcher.num_cancelled == 3


@pytest.mark.parametrize("is_grpc", [False, True])
async def test_inputs_under_way_count_in_a_keys_quota(vectored, tmp_path, is_grpc):
    path, made = tmp_path / "keys.json", made_key("a", "a")
    change_keys(path, lambda: KeyFile({"a": Quota(concurrent=2)}, (made[0],)))
    server = {"keys_file": str(path)}
    said = {"authorization": f"Bearer {made[1]}"}
    async with (
        serving(vectored, embed, server=server) as api,
        httpx.AsyncClient(trust_env=False) as client,
        grpc.aio.insecure_channel(api.grpc_address) as channel,
    ):
        for count in (2, 3, 2):
            if is_grpc:
                inputs = [pb.EmbedInput(text="a")] * count
                call = InferenceStub(channel).Embed(pb.EmbedRequest(inputs=inputs), metadata=[*said.items()])
                with suppress(grpc.aio.AioRpcError):
                    assert len([response async for response in call]) == count
                is_refused = await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            else:
                body = {"model": MODEL, "input": ["a"] * count}
                answer = await client.post(f"{api.url}/v1/embeddings", json=body, headers=said)
                is_refused = answer.status_code == 429
            assert is_refused == (count == 3)
        assert api.completions.places.num_taken == 0
