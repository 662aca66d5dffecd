"""Several choices of one gRPC call, and its prompt shown before them."""

from contextlib import suppress

import grpc
import pytest

from base.errors import LostError
from conductor.api.keys import KeyFile, Quota, change_keys, made_key
from conductor.api.options import MAX_PROMPT_LOGPROBS
from protos import inference_pb2 as pb
from tests.conductor.api.conversing import CALL
from tests.conductor.api.test_service import answer, calling, ids, refusal, talk
from tests.conductor.fakes import WAIT, scored, spoken

QUESTION = {"role": "user", "content": "1 + 2?"}
ADD = pb.Tool(name="add", parameters='{"type": "object", "properties": {"a": {"type": "integer"}}}')


def by_index(responses):
    """The texts of the choices, in order."""
    texts = {}
    for response in responses:
        texts[response.index] = texts.get(response.index, "") + response.text
    return [texts[index] for index in sorted(texts)]


async def test_choices_have_an_index_each_one_seed_after_the_other_and_one_usage(model):
    def script(request):
        return spoken(model, f"choice {request.sampling.seed}", num_cached_tokens=request.sampling.seed)

    async with calling(model, script) as (stub, api):
        responses = await answer(stub, text="say", n=3, sampling=pb.Sampling(seed=5), request_id="mine")
        one = await answer(stub, text="say", n=1, sampling=pb.Sampling(seed=5))
    assert by_index(responses) == ["choice 5", "choice 6", "choice 7"]
    assert {response.request_id for response in responses} == {"mine"}
    ends = [response.index for response in responses if response.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert [response.HasField("usage") for response in responses].index(True) == len(responses) - 1
    num_tokens = sum(len(response.token_ids) for response in responses)
    expected = pb.Usage(prompt_tokens=3, completion_tokens=num_tokens, cached_tokens=5)
    assert responses[-1].usage == expected
    assert by_index(one) == ["choice 5"]
    assert len({request.request_id for request in api.dispatcher.requests}) == 4


async def test_the_first_choice_goes_ahead(model):
    async with calling(model, lambda request: [LostError("its node is gone")]) as (stub, api):
        await refusal(stub, text="say", n=4)
    (request,) = api.dispatcher.requests
    assert request.request_id.endswith("-0")


async def test_choices_are_taken_apart_each_on_its_own(tooled):
    async with calling(tooled, lambda request: spoken(tooled, f"<think>Sum.</think>{CALL}")) as (stub, _):
        responses = await answer(stub, **talk(QUESTION, tools=[ADD]), n=2)
    calls = [(response.index, call) for response in responses for call in response.tool_calls]
    assert sorted((index, call.name) for index, call in calls) == [(0, "add"), (1, "add")]
    assert len({call.id for _, call in calls}) == 2
    ends = [response.finish_reason for response in responses if response.finish_reason]
    assert ends == ["tool_calls", "tool_calls"]
    (usage,) = [response.usage for response in responses if response.HasField("usage")]
    assert usage.reasoning_tokens > 0
    assert usage.reasoning_tokens % 2 == 0, "of both"


async def test_a_client_that_leaves_takes_all_choices_with_it(model):
    def script(request):
        return [*spoken(model, "hi")[:1], WAIT]

    async with calling(model, script) as (stub, api):
        call = stub.Generate(pb.GenerateRequest(text="say", n=3))
        seen = {(await call.read()).index for _ in range(3)}
        assert seen == {0, 1, 2}
        assert api.completions.places.num_taken == 3
        call.cancel()
        await api.completions.wait_idle()
        assert api.dispatcher.num_cancelled == 3
        assert api.completions.places.num_taken == 0


async def test_a_choice_that_fails_ends_the_others(model):
    def script(request):
        is_first = request.request_id.endswith("-0")
        return [*spoken(model, "hi")[:1], WAIT if is_first else LostError("its node is gone")]

    async with calling(model, script) as (stub, api):
        error, _ = await refusal(stub, text="say", n=2)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (api.dispatcher.num_open, api.dispatcher.num_cancelled) == (0, 1)


async def test_choices_count_in_a_keys_quota(model, tmp_path):
    path, (key, secret) = tmp_path / "keys.json", made_key("a", "a")
    change_keys(path, lambda: KeyFile({"a": Quota(concurrent=2)}, (key,)))
    async with calling(model, lambda request: spoken(model, "hi"), keys_file=str(path)) as (stub, api):
        codes = []
        for count in (2, 3, 2):
            asked = pb.GenerateRequest(text="say", n=count)
            call = stub.Generate(asked, metadata=[("authorization", f"Bearer {secret}")])
            with suppress(grpc.aio.AioRpcError):
                assert len(by_index([response async for response in call])) == count
            codes.append(await call.code())
        assert api.completions.places.num_taken == 0
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK]


@pytest.mark.parametrize("fields", [{"text": "one, two"}, {"token_ids": True}])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_the_prompt_is_shown_once_before_the_first_choice(model, fields, num_choices):
    given = ids(model, "one, two")
    fields = fields if "text" in fields else {"token_ids": pb.TokenIds(ids=given)}
    async with calling(model, lambda request: scored(model, request, "!")) as (stub, api):
        plain = await answer(stub, **fields, echo=True, n=num_choices)
        responses = await answer(stub, **fields, echo=True, n=num_choices, num_logprobs=1)
    for found in (plain, responses):
        assert found[0].prompt.text == "one, two"
        assert list(found[0].prompt.token_ids) == given
        assert [response.HasField("prompt") for response in found] == [True] + [False] * (len(found) - 1)
        assert by_index(found) == ["!"] * num_choices
    assert not plain[0].prompt.logprobs
    first, *others = responses[0].prompt.logprobs
    assert first == pb.TokenLogprobs(), "nothing comes before it"
    assert [item.sampled.token_id for item in others] == given[1:]
    assert [item.sampled.logprob for item in others] == [-float(at) for at in range(1, len(given))]
    assert {(top.token_id, top.logprob) for item in others for top in item.top} == {(100, -0.5)}
    scoring = [request.num_prompt_logprobs for request in api.dispatcher.requests[num_choices:]]
    assert scoring == [1] + [None] * (num_choices - 1)


async def test_a_long_prompt_is_shown_in_parts(model, monkeypatch):
    monkeypatch.setattr("conductor.api.grpc_generation.PART_CHARS", 4)
    monkeypatch.setattr("conductor.api.grpc_generation.PART_UNITS", 6)
    given = ids(model, "one, two")
    async with calling(model, lambda request: scored(model, request, "!")) as (stub, _):
        responses = await answer(stub, text="one, two", echo=True, num_logprobs=1)
    parts = [response.prompt for response in responses if response.HasField("prompt")]
    assert max(len(part.text) for part in parts) == 4
    assert max(len(part.token_ids) for part in parts) == 3
    assert "".join(part.text for part in parts) == "one, two"
    assert [token_id for part in parts for token_id in part.token_ids] == given
    assert sum(len(part.logprobs) for part in parts) == len(given)


async def test_a_prompt_can_be_had_alone(model):
    async with calling(model, lambda request: scored(model, request, "!")) as (stub, api):
        stop = pb.Stop(max_tokens=0)
        responses = await answer(stub, text="one, two", echo=True, num_logprobs=0, stop=stop)
        error, _ = await refusal(stub, text="one, two", stop=stop)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(responses[0].prompt.logprobs) == len(ids(model, "one, two"))
    assert (by_index(responses), responses[-1].finish_reason) == ([""], "length")
    assert not any(response.token_ids for response in responses)
    assert responses[-1].usage == pb.Usage(prompt_tokens=len(ids(model, "one, two")))
    assert [request.stop.max_tokens for request in api.dispatcher.requests] == [1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "say", "n": 129}, "n"),
        ({**talk(QUESTION), "echo": True}, "echo"),
        ({"text": "say", "stop": pb.Stop(max_tokens=0)}, "stop.max_tokens"),
        ({"token_ids": pb.TokenIds(ids=[10**6]), "echo": True}, "token_ids.ids"),
        ({"text": "say it all", "echo": True, "num_logprobs": 1}, "num_logprobs"),
    ],
)
async def test_what_cannot_be_shown_is_refused_by_field(model, monkeypatch, fields, param):
    assert MAX_PROMPT_LOGPROBS == 1 << 18
    monkeypatch.setattr("conductor.api.options.MAX_PROMPT_LOGPROBS", 10)
    async with calling(
        model,
        lambda request: scored(model, request, "!"),
    ) as (stub, api):
        error, details = await refusal(stub, **fields)
        assert not api.dispatcher.requests
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == param


@pytest.mark.parametrize("echo", [False, True])
async def test_token_ids_beyond_the_window_are_refused_as_such_shown_or_not(model, echo):
    token_ids = pb.TokenIds(ids=[1] * model.max_model_len)
    async with calling(model, lambda request: spoken(model, "!")) as (stub, _):
        for given in (token_ids, pb.TokenIds(ids=[*token_ids.ids, 1])):
            _, details = await refusal(stub, token_ids=given, echo=echo, num_logprobs=1)
            assert details["ErrorInfo"].reason == "ContextLengthError"
            assert details["BadRequest"].field_violations[0].field == "token_ids.ids"
