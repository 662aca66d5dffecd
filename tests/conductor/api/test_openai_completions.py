"""/v1/completions and the small calls, by the official client against a real server."""

from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from base.request import FinishReason
from conductor.api.openai_schema import DEFAULT_COMPLETION_TOKENS
from tests.conductor.fakes import MODEL, scored, serving, spoken


@asynccontextmanager
async def completing(model, text="hi there", **spoken_options):
    async with (
        serving(model, lambda request: spoken(model, text, **spoken_options)) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, api


def ids(model, text):
    return list(model.tokenizer.encode(text, add_special_tokens=False))


async def test_completion_has_text_finish_reason_and_usage(model):
    async with completing(model, finish=FinishReason.LENGTH) as (client, api):
        answer = await client.completions.create(model=MODEL, prompt="say")
    assert (answer.object, answer.choices[0].text) == ("text_completion", "hi there")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids(model, "say"))
    assert answer.usage.completion_tokens == len(ids(model, "hi there"))
    assert api.dispatcher.requests[0].stop.max_tokens == DEFAULT_COMPLETION_TOKENS


async def test_streamed_completion_ends_with_a_finish_reason_and_the_usage(model):
    async with completing(model) as (client, _):
        stream = await client.completions.create(
            model=MODEL, prompt="say", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hi there"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == len(ids(model, "say"))


async def test_prompt_takes_four_forms(model):
    first, second = ids(model, "one"), ids(model, "three")
    async with completing(model) as (client, api):
        for prompt in ("one", first, ["one", "three"], [first, second]):
            answer = await client.completions.create(model=MODEL, prompt=prompt)
            is_one = prompt in ("one", first)
            assert [choice.index for choice in answer.choices] == ([0] if is_one else [0, 1])
            assert answer.usage.prompt_tokens == len(first) + (0 if is_one else len(second))
    seen = [list(request.token_ids) for request in api.dispatcher.requests]
    assert seen == [first, first, first, second, first, second]


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(model):
    def echo(request):
        return spoken(model, model.tokenizer.decode(request.token_ids, skip_special_tokens=True))

    async with (
        serving(model, echo) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, seed=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    assert answer.usage.prompt_tokens == 2
    assert sorted(request.sampling.seed for request in api.dispatcher.requests) == [1, 1, 2, 2]


@asynccontextmanager
async def scoring(model, text="!"):
    async with (
        serving(model, lambda request: scored(model, request, text)) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, api


async def test_an_echo_has_the_prompts_logprobs_before_those_of_the_text(model):
    prompt = "one, two"
    given = ids(model, prompt)
    async with scoring(model) as (client, api):
        asked = {"model": MODEL, "prompt": [prompt, given], "echo": True, "logprobs": 1, "max_tokens": 1}
        whole = await client.completions.create(**asked, n=2)
        stream = await client.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
    for choice in whole.choices:
        found = choice.logprobs
        assert choice.text == "".join(found.tokens) == "one, two!"
        assert found.token_logprobs == [None, *(-float(at) for at in range(1, len(given))), -0.5]
        assert found.top_logprobs[0] is None
        assert all(len(top) == 2 for top in found.top_logprobs[1:-1])
        assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        parts = [choice.logprobs for choice in own if choice.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            together = [item for part in parts for item in getattr(part, name)]
            assert together == getattr(whole.choices[0].logprobs, name)
    # The choices after a prompt's first show what that one brought.
    assert sum(request.num_prompt_logprobs is not None for request in api.dispatcher.requests) == 4
    assert len(api.dispatcher.requests) == 6


async def test_a_prompt_can_be_had_without_an_answer(model):
    async with scoring(model) as (client, _):
        asked = {"model": MODEL, "prompt": "one, two", "echo": True, "logprobs": 0, "max_tokens": 0}
        answer = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        chunks = [chunk async for chunk in stream]
    given = ids(model, "one, two")
    assert answer.choices[0].text == "one, two" == "".join(chunk.choices[0].text for chunk in chunks)
    assert len(answer.choices[0].logprobs.tokens) == len(given)
    assert answer.choices[0].finish_reason == "length" == chunks[-1].choices[0].finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(given), 0)


async def test_more_logprobs_than_an_answer_may_have_are_refused(model, monkeypatch):
    monkeypatch.setattr("conductor.api.options.MAX_PROMPT_LOGPROBS", 20)
    async with scoring(model) as (client, _):
        asked = {"model": MODEL, "echo": True, "max_tokens": 1}
        await client.completions.create(**asked, prompt=[[5] * 5] * 2, logprobs=1)
        with pytest.raises(
            openai.BadRequestError, match="at most 20 of all prompts together, not 30"
        ) as refused:
            await client.completions.create(**asked, prompt=[[5] * 5] * 2, logprobs=2)
        assert refused.value.param == "logprobs"


async def test_prompt_is_echoed_before_the_text(model):
    async with completing(model) as (client, _):
        whole = await client.completions.create(model=MODEL, prompt="say: ", echo=True)
        of_tokens = await client.completions.create(model=MODEL, prompt=ids(model, "é "), echo=True)
        stream = await client.completions.create(model=MODEL, prompt="say: ", echo=True, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert (whole.choices[0].text, streamed) == ("say: hi there", "say: hi there")
    assert of_tokens.choices[0].text == "é hi there"


async def test_logprobs_are_lists_with_offsets_into_the_text(model):
    async with completing(model, "hel", with_logprobs=True) as (client, api):
        answer = await client.completions.create(model=MODEL, prompt="say", logprobs=2)
        stream = await client.completions.create(model=MODEL, prompt="say", logprobs=2, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["he", "l", "<|end|>"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 2, 3]
    assert logprobs.top_logprobs[0]["he"] == -0.5
    assert len(logprobs.top_logprobs[0]) == 3
    assert [offset for part in parts if part for offset in part.text_offset] == [0, 2, 3]
    assert api.dispatcher.requests[0].num_logprobs == 2


async def test_long_prompt_is_tokenised_like_a_short_one(model):
    """On another thread; the tiny model's window is lifted for it."""
    text = "hello wörld " * 1000
    async with completing(model) as (_, api), httpx.AsyncClient() as client:
        answer = await client.post(f"{api.url}/tokenize", json={"prompt": text[:200]})
        assert answer.json()["tokens"] == ids(model, text[:200])
        too_long = await client.post(f"{api.url}/v1/completions", json={"model": MODEL, "prompt": text})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("echo", [False, True])
async def test_token_ids_beyond_the_window_are_refused_as_such_shown_or_not(model, echo):
    body = {"model": MODEL, "prompt": [1] * (model.max_model_len + 1), "echo": echo}
    async with completing(model) as (_, api), httpx.AsyncClient() as client:
        answer = await client.post(f"{api.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_models_are_listed(model):
    async with completing(model) as (client, _):
        models = [item async for item in await client.models.list()]
        one = await client.models.retrieve(MODEL)
    assert [item.id for item in models] == [MODEL] == [one.id]
    assert one.model_extra["max_model_len"] == model.max_model_len


async def test_text_is_tokenised_and_put_together_again(model):
    async with completing(model) as (_, api), httpx.AsyncClient(base_url=api.url) as client:
        tokens = (await client.post("/tokenize", json={"prompt": "héllo"})).json()
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
        of_chat = (await client.post("/tokenize", json=chat)).json()
    assert tokens == {"count": 5, "max_model_len": model.max_model_len, "tokens": ids(model, "héllo")}
    assert text == {"prompt": "héllo"}
    assert of_chat["tokens"] == ids(model, "<|im_start|>user\nx<|im_end|>\n")


async def test_operators_learn_health_version_and_metrics(model):
    async with completing(model) as (client, api), httpx.AsyncClient(base_url=api.url) as http:
        await client.completions.create(model=MODEL, prompt="say")
        assert (await http.get("/health")).status_code == 200
        api.dispatcher.is_ready = False
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/version")).json()["version"]
        metrics = (await http.get("/metrics")).text
    assert f"conductor_generation_tokens_total {len(ids(model, 'hi there')) + 1:.1f}" in metrics
    assert 'conductor_sequences_total{outcome="stop"} 1.0' in metrics
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0' in metrics
