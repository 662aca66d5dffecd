"""/v1/chat/completions, by the official client against a real server."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from base.request import FinishReason
from tests.conductor.fakes import MODEL, serving, spoken

HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@asynccontextmanager
async def chatting(model, text="hi there", server=None, **spoken_options):
    """A client of a server whose model always says `text`; and what it runs on."""
    async with (
        serving(model, lambda request: spoken(model, text, **spoken_options), server=server or {}) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions, api


async def streamed(chat, **options):
    stream = await chat.create(model=MODEL, messages=HELLO, stream=True, **options)
    return [chunk async for chunk in stream]


def contents(chunks, index=0):
    return [
        choice.delta.content
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index and choice.delta.content is not None
    ]


async def test_answer_has_text_finish_reason_and_usage(model):
    async with chatting(model, num_cached_tokens=5) as (chat, api):
        answer = await chat.create(model=MODEL, messages=HELLO)
    prompt = model.tokenizer.encode(HELLO_TEXT, add_special_tokens=False)
    assert api.dispatcher.requests[0].token_ids == prompt
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hi there"
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    num_tokens = len(model.tokenizer.encode("hi there", add_special_tokens=False)) + 1
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), num_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 5


async def test_stream_is_role_then_text_then_finish_reason(model):
    async with chatting(model, "hé🎉!", per_step=2) as (chat, _):
        chunks = await streamed(chat)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert "".join(contents(chunks)) == "hé🎉!"
    assert all(text for text in contents(chunks)[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].choices[0].delta.content is None
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_chunk_comes_last_and_only_if_asked_for(model):
    async with chatting(model, num_cached_tokens=2) as (chat, _):
        chunks = await streamed(chat, stream_options={"include_usage": True})
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2


async def test_stream_is_events_of_one_line_up_to_done(model):
    async with chatting(model) as (_, api), httpx.AsyncClient() as client:
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        answer = await client.post(f"{api.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    assert json.loads(events[1].removeprefix("data: "))["choices"][0] == {
        "index": 0,
        "delta": {"content": "h"},
        "logprobs": None,
        "finish_reason": None,
    }


async def test_choices_share_the_prompt_and_count_the_seed_up(model):
    async with chatting(model, num_cached_tokens=3) as (chat, api):
        answer = await chat.create(model=MODEL, messages=HELLO, n=3, seed=41)
    requests = api.dispatcher.requests
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in requests] == [41, 42, 43]
    assert len({request.request_id for request in requests}) == 3
    assert answer.usage.prompt_tokens == len(requests[0].token_ids)
    assert answer.usage.completion_tokens == 3 * len(spoken(model, "hi there"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_the_first_choice_is_prefilled_before_the_others_are_asked_for(model):
    def script(request):
        begun.append(request.request_id[-2:])
        yield spoken(model, "h")[0]
        begun.append("went on")
        yield from spoken(model, "i")

    begun = []
    async with serving(model, script) as api, httpx.AsyncClient() as client:
        body = {"model": MODEL, "messages": HELLO, "n": 3}
        await client.post(f"{api.url}/v1/chat/completions", json=body, timeout=60)
    assert begun[:2] == ["-0", "went on"], "the others were asked for at once"
    assert sorted(set(begun)) == ["-0", "-1", "-2", "went on"]


async def test_choices_stream_as_their_tokens_come(model):
    async with chatting(model) as (chat, _):
        chunks = await streamed(chat, n=2)
    assert ["".join(contents(chunks, index)) for index in (0, 1)] == ["hi there"] * 2
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order), "one choice after the other, not interleaved"
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == "stop"


@pytest.mark.parametrize("stop", ["th", ["zz", "th"]])
@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_stop_string_ends_text_and_request(model, stop, per_step):
    async with chatting(model, "hi there", per_step=per_step) as (chat, api):
        whole = await chat.create(model=MODEL, messages=HELLO, stop=stop)
        chunks = await streamed(chat, stop=stop)
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hi ", "stop")
    assert ("".join(contents(chunks)), chunks[-1].choices[0].finish_reason) == ("hi ", "stop")
    assert whole.usage.completion_tokens == len(model.tokenizer.encode("hi th", add_special_tokens=False))
    assert api.dispatcher.num_cancelled == (2 if per_step < 100 else 0)


async def test_stop_string_can_be_shown(model):
    async with chatting(model, "hi there") as (chat, _):
        answer = await chat.create(
            model=MODEL, messages=HELLO, stop="th", extra_body={"include_stop_str_in_output": True}
        )
    assert answer.choices[0].message.content == "hi th"


async def test_text_held_back_for_a_stop_string_comes_with_the_end(model):
    async with chatting(model, "hi th", finish=FinishReason.LENGTH) as (chat, _):
        chunks = await streamed(chat, stop="there")
    assert "".join(contents(chunks)) == "hi th"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_special_tokens_are_shown_only_if_asked_for(model):
    async with chatting(model, "a<|im_start|>b") as (chat, _):
        hidden = await chat.create(model=MODEL, messages=HELLO)
        shown = await chat.create(model=MODEL, messages=HELLO, extra_body={"skip_special_tokens": False})
    assert hidden.choices[0].message.content == "ab"
    assert shown.choices[0].message.content == "a<|im_start|>b"


async def test_logprobs_name_token_bytes_and_what_else_was_likely(model):
    async with chatting(model, "é", with_logprobs=True) as (chat, api):
        answer = await chat.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
        chunks = await streamed(chat, logprobs=True, top_logprobs=2)
    first, second, end = answer.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("bytes:\\xc3", [0xC3], -0.5)
    assert bytes(first.bytes + second.bytes).decode() == "é"
    assert end.token == "<|end|>"
    assert [top.logprob for top in first.top_logprobs] == [-0.25, -9999.0]
    assert api.dispatcher.requests[0].num_logprobs == 2
    of_chunks = [entry for chunk in chunks if (part := chunk.choices[0].logprobs) for entry in part.content]
    assert of_chunks == answer.choices[0].logprobs.content


async def test_no_logprobs_are_asked_of_the_nodes_unless_the_client_did(model):
    async with chatting(model, with_logprobs=True) as (chat, api):
        answer = await chat.create(model=MODEL, messages=HELLO)
        await chat.create(model=MODEL, messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is None
    assert [request.num_logprobs for request in api.dispatcher.requests] == [None, 0]


async def test_every_option_reaches_the_request(model):
    async with chatting(model, server={"critical_tenants": ("*",)}) as (chat, api):
        await chat.create(
            model=MODEL,
            messages=HELLO,
            temperature=0,
            top_p=0.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"7": -100, "5": 1.5},
            seed=-1,
            max_completion_tokens=9,
            max_tokens=4,
            extra_headers={"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "50"},
            extra_body={
                "top_k": 3,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "stop_token_ids": [9],
                "priority": -2,
                "cache_salt": "mine",
            },
        )
    request = api.dispatcher.requests[0]
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 3, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert (sampling.frequency_penalty, sampling.seed) == (-0.5, 2**64 - 1)
    assert sampling.logit_bias == ((5, 1.5), (7, -100.0))
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids) == (9, 2, (0, 2, 9))
    assert (request.slo.ttft_slo_s, request.slo.tbt_slo_s) == (0.25, 0.05)
    assert (request.priority, request.cache_salt) == (2, "mine")


async def test_what_a_client_leaves_open_is_the_models_own(model):
    async with chatting(model) as (chat, api):
        await chat.create(model=MODEL, messages=HELLO)
        await chat.create(model=MODEL, messages=HELLO, extra_body={"ignore_eos": True})
    first, second = api.dispatcher.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.5, 7, 1.0)
    assert first.stop.max_tokens == model.max_model_len - len(first.token_ids)
    assert (first.stop.stop_token_ids, second.stop.stop_token_ids) == ((0, 2), ())
    assert first.sampling.seed != second.sampling.seed


async def test_content_may_be_parts_of_text(model):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with chatting(model) as (chat, api):
        await chat.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    prompt = model.tokenizer.decode(api.dispatcher.requests[0].token_ids, skip_special_tokens=False)
    assert "user\none\ntwo<|im_end|>" in prompt


async def test_clients_request_id_is_echoed_and_never_the_clusters_own(model):
    async with chatting(model) as (chat, api):
        first = await chat.with_raw_response.create(
            model=MODEL, messages=HELLO, extra_headers={"X-Request-Id": "mine"}
        )
        second = await chat.with_raw_response.create(
            model=MODEL, messages=HELLO, extra_body={"request_id": "mine"}
        )
    assert [answer.headers["x-request-id"] for answer in (first, second)] == ["mine", "mine"]
    assert first.parse().id == "chatcmpl-mine"
    ids = [request.request_id for request in api.dispatcher.requests]
    assert all(request_id.startswith("mine-") for request_id in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_token_ids_are_returned_if_asked_for(model, is_streamed):
    async with chatting(model, "hi") as (_, api), httpx.AsyncClient() as client:
        body = {"model": MODEL, "messages": HELLO, "return_token_ids": True, "stream": is_streamed}
        answer = await client.post(f"{api.url}/v1/chat/completions", json=body)
    if is_streamed:
        events = answer.text.split("\n\n")[:-2]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    else:
        choices = answer.json()["choices"]
    prompt = list(model.tokenizer.encode(HELLO_TEXT, add_special_tokens=False))
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [prompt]
    said = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert said == [*model.tokenizer.encode("hi", add_special_tokens=False), 0]


async def test_synchronous_client_works_too(model):
    def talk(url):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async with chatting(model) as (_, api):
        assert await asyncio.to_thread(talk, f"{api.url}/v1") == "hi there"


async def test_many_streams_at_once_do_not_mix(model):
    """Each says its own prompt back."""

    def echo(request):
        text = model.tokenizer.decode(request.token_ids, skip_special_tokens=True)
        return spoken(model, text.split("\n")[1])

    async def ask(client, index):
        chunks = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"number {index}"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in await chunks])

    async with (
        serving(model, echo) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answers = await asyncio.gather(*(ask(client, index) for index in range(32)))
    assert answers == [f"number {index}" for index in range(32)]
