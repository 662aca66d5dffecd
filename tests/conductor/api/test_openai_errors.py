"""What goes wrong, as a client sees it: OpenAI's error object, the right status, little work."""

import asyncio
import json

import httpx
import openai
import pytest

from base.errors import (
    CapacityError,
    DeadlineError,
    LostError,
    ProtocolError,
    RejectedError,
    ServeError,
    SloUnreachableError,
    UnavailableError,
)
from base.request import FinishReason
from conductor.serving.generated import Generated
from tests.conductor.fakes import MAX_MODEL_LEN, MODEL, WAIT, serving, spoken
from tests.effort import counting

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
MAX_LINES = 50_000
MAX_GROWTH = 20
"""Bytes held at once for each byte of a body, those of the client too."""
SMALL_BYTES = 1 << 20


def chat(**fields) -> str:
    return json.dumps({"model": MODEL, "messages": HELLO, **fields})


def completion(**fields) -> str:
    return json.dumps({"model": MODEL, "prompt": "x", **fields})


def said(content: object) -> str:
    return chat(messages=[{"role": "user", "content": content}])


# path, body, field at fault
REFUSED = {
    "no body": (CHAT, "", None),
    "no JSON": (CHAT, "{", None),
    "no UTF-8": (CHAT, b"\xff\xfe", None),
    "a list": (CHAT, "[]", None),
    "a lone surrogate": (
        CHAT,
        '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        None,
    ),
    "deep JSON": (CHAT, '{"x":' + "[" * 100_000 + "]" * 100_000 + "}", None),
    "deep JSON in a message": (CHAT, said([[[[[["x"]]]]]]), "messages[0].content[0]"),
    "no model": (CHAT, "{}", "model"),
    "no messages": (CHAT, json.dumps({"model": MODEL}), "messages"),
    "empty messages": (CHAT, chat(messages=[]), "messages"),
    "5k messages": (CHAT, chat(messages=HELLO * 5_000), "messages"),
    "message of wrong type": (CHAT, chat(messages=["hello"]), "messages[0]"),
    "content of wrong type": (CHAT, said(5), "messages[0].content"),
    "content null": (CHAT, said(None), "messages[0].content"),
    "an image": (CHAT, said([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    "unknown role": (CHAT, chat(messages=[{"role": "root", "content": "x"}]), "messages[0].role"),
    "tool calls": (
        CHAT,
        chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
        "messages[0].tool_calls[0].id",
    ),
    "quoted number": (CHAT, chat(max_tokens="5"), "max_tokens"),
    "fractional count": (CHAT, chat(max_tokens=5.5), "max_tokens"),
    "boolean count": (CHAT, chat(max_tokens=True), "max_tokens"),
    "max_tokens zero": (CHAT, chat(max_tokens=0), "max_tokens"),
    "max_completion_tokens negative": (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens"),
    "max_tokens past the window": (CHAT, chat(max_tokens=MAX_MODEL_LEN), "max_tokens"),
    "temperature NaN": (
        CHAT,
        '{"model": "tiny", "messages": [{"role":"user","content":"x"}], "temperature": NaN}',
        "temperature",
    ),
    "temperature inf": (
        CHAT,
        '{"model": "tiny", "messages": [{"role":"user","content":"x"}], "temperature": 1e999}',
        "temperature",
    ),
    "temperature high": (CHAT, chat(temperature=2.1), "temperature"),
    "temperature negative": (CHAT, chat(temperature=-0.1), "temperature"),
    "top_p zero": (CHAT, chat(top_p=0), "top_p"),
    "top_k huge": (CHAT, chat(top_k=10**30), "top_k"),
    "seed huge": (CHAT, chat(seed=10**30), "seed"),
    "a number of 100k digits": (CHAT, '{"seed": ' + "1" * 100_000 + "}", None),
    "penalty": (CHAT, chat(presence_penalty=3), "presence_penalty"),
    "repetition_penalty": (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    "min_p": (CHAT, chat(min_p=2), "min_p"),
    "min_tokens past max_tokens": (CHAT, chat(min_tokens=6, max_tokens=5), "min_tokens"),
    "n zero": (CHAT, chat(n=0), "n"),
    "n too large": (CHAT, chat(n=10**9), "n"),
    "10k stop strings": (CHAT, chat(stop=["x"] * 10_000), "stop"),
    "long stop string": (CHAT, chat(stop="x" * 100_000), "stop"),
    "empty stop string": (CHAT, chat(stop=[""]), "stop"),
    "stop of wrong type": (CHAT, chat(stop=[5]), "stop[0]"),
    "stop token of another vocabulary": (CHAT, chat(stop_token_ids=[10**9]), "stop_token_ids"),
    "logit_bias of another vocabulary": (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    "logit_bias key": (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    "logit_bias value": (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    "20k biases": (CHAT, chat(logit_bias={str(i): 1 for i in range(20_000)}), "logit_bias"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=3), "top_logprobs"),
    "top_logprobs large": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "stream_options alone": (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    "stream of wrong type": (CHAT, chat(stream="yes"), "stream"),
    "tools": (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    "tool_choice": (CHAT, chat(tool_choice="required"), "tool_choice"),
    "response_format": (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    "guided decoding": (CHAT, chat(guided_regex="("), "guided_regex"),
    "templates variable": (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    "request_id": (CHAT, chat(request_id="a\nb"), "request_id"),
    "prompt too long": (CHAT, said("x" * MAX_MODEL_LEN), "messages"),
    "prompt far too long": (CHAT, said("x" * 900_000), "messages"),
    "no prompt": (COMPLETIONS, json.dumps({"model": MODEL}), "prompt"),
    "empty prompt": (COMPLETIONS, completion(prompt=""), "prompt"),
    "no prompts": (COMPLETIONS, completion(prompt=[]), "prompt"),
    "prompt of wrong type": (COMPLETIONS, completion(prompt={}), "prompt"),
    "mixed prompts": (COMPLETIONS, completion(prompt=[1, "x"]), "prompt"),
    "token of another vocabulary": (COMPLETIONS, completion(prompt=[5, 10**9]), "prompt"),
    "negative token": (COMPLETIONS, completion(prompt=[-1]), "prompt"),
    "too many tokens": (COMPLETIONS, completion(prompt=[5] * 100_000), "prompt"),
    "too many prompts": (COMPLETIONS, completion(prompt=["x"] * 10_000), "prompt"),
    "too many choices": (COMPLETIONS, completion(prompt=["x"] * 10, n=100), "n"),
    "suffix": (COMPLETIONS, completion(suffix="x"), "suffix"),
    "best_of": (COMPLETIONS, completion(best_of=5), "best_of"),
    "no tokens and no echo": (COMPLETIONS, completion(max_tokens=0), "max_tokens"),
    "logprobs": (COMPLETIONS, completion(logprobs=100), "logprobs"),
    "tokenize nothing": ("/tokenize", "{}", "prompt"),
    "detokenize text": ("/detokenize", '{"tokens": "x"}', "tokens"),
    "detokenize another vocabulary": ("/detokenize", '{"tokens": [263]}', "tokens"),
}


async def test_hostile_and_mistaken_bodies_are_refused_by_field_and_cheaply(model):
    """One server for all: a refusal must leave nothing behind that the next one sees."""
    async with (
        serving(model, lambda request: spoken(model, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        await client.get("/health")
        for what, (path, body, param) in REFUSED.items():
            with counting() as effort:
                answer = await client.post(path, content=body)
            assert effort.lines <= MAX_LINES, what
            assert effort.peak_bytes <= SMALL_BYTES + MAX_GROWTH * len(body), what
            error = answer.json()["error"]
            assert answer.status_code == 400, what
            assert (error["type"], error["param"]) == ("invalid_request_error", param), what
            assert error["message"], what
        assert api.dispatcher.requests == []
        assert (
            await client.post(CHAT, content=chat(user="me", store=True, unheard_of=[1]))
        ).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("n", None),
        ("stop", None),
    ],
)
async def test_wishes_that_change_nothing_are_granted(model, field, value):
    async with (
        serving(model, lambda request: spoken(model, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        assert (await client.post(CHAT, content=chat(**{field: value}))).status_code == 200


FAILURES = [
    (SloUnreachableError("predicted 2 s", 3.2), 429, "slo_unreachable", "4"),
    (CapacityError("no blocks", 0.1), 429, "no_capacity", "1"),
    (RejectedError("full"), 429, "rate_limit_exceeded", "1"),
    (UnavailableError("no node"), 503, "unavailable", "2"),
    (LostError("node died"), 503, "lost", "2"),
    (DeadlineError("too slow"), 504, "deadline_exceeded", None),
    (ProtocolError("secret detail"), 500, "internal_error", None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_a_status(model, error, status, code, retry_after, stream):
    async with (
        serving(model, lambda request: [error]) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.post(CHAT, content=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == retry_after
    assert answer.headers["x-request-id"]
    assert "secret" not in answer.text


async def test_official_client_waits_and_tries_again_when_rejected(model):
    def first_time_rejected(request):
        is_first = len(api.dispatcher.requests) == 1
        return [RejectedError("full", 0.001)] if is_first else spoken(model, "hi")

    async with (
        serving(model, first_time_rejected) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=1) as client,
    ):
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "hi"


async def test_failure_after_the_first_token_is_an_event_and_no_done(model):
    script = [spoken(model, "hi")[0], LostError("node died")]
    async with serving(model, lambda request: script) as api:
        async with httpx.AsyncClient(base_url=api.url) as client:
            raw = await client.post(CHAT, content=chat(stream=True))
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match="node died"):
                async for _ in stream:
                    pass
    assert raw.status_code == 200
    assert json.loads(raw.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "lost"
    assert "[DONE]" not in raw.text


async def test_a_rejection_tells_what_was_predicted_and_when_to_come_back(model):
    failure = SloUnreachableError("too late", 2.5, predicted_ttft_s=1.25, predicted_tbt_s=0.03)
    async with (
        serving(model, lambda request: [failure]) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.post(CHAT, content=chat())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    told = answer.json()["error"]
    assert (told["code"], told["predicted_ttft_s"], told["predicted_tbt_s"]) == (
        "slo_unreachable",
        1.25,
        0.03,
    )


async def test_one_failing_choice_fails_the_call_and_cancels_the_others(model):
    def script(request):
        if request.request_id.endswith("-1"):
            return [RejectedError("full")]
        return [*spoken(model, "h")[:1], WAIT]

    async with serving(model, script) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=chat(n=3))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 0)
    assert answer.status_code == 429
    assert api.dispatcher.num_cancelled == 2


@pytest.mark.parametrize(
    "script",
    [[], [Generated((), FinishReason.ERROR, 0)], [ServeError("odd")]],
    ids=["ends without a reason", "ends in error", "unknown error"],
)
async def test_answer_that_is_not_whole_is_never_passed_off_as_one(model, script):
    async with serving(model, lambda request: script) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=chat())
    assert answer.status_code >= 500


async def test_bug_is_told_as_nothing_but_a_bug(model):
    def broken(request):
        raise KeyError("secret detail")

    async with serving(model, broken) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=chat())
        assert (await client.get("/health")).status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


@pytest.mark.parametrize("name", ["authorization", "x-tenant-id", "x-slo-ttft-ms"])
async def test_a_header_that_stands_twice_is_refused_by_its_name(model, name):
    async with (
        serving(model, lambda request: spoken(model, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        twice = await client.post(CHAT, content=chat(), headers=[(name, "5"), (name, "5")])
        other = await client.post(CHAT, content=chat(), headers=[("x-forwarded-for", "::1")] * 2)
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, name)
    assert other.status_code == 200


async def test_unknown_model_is_not_found(model):
    async with (
        serving(model, lambda request: []) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-5" * 1000, messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert len(str(caught.value)) < 1000
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            CHAT,
            {"max_completion_tokens": 0},
            "max_completion_tokens: between 1 and 2147483648 is wanted, not 0",
        ),
        (CHAT, {"max_tokens": 0}, "max_tokens: between 1 and 2147483648 is wanted, not 0"),
        (COMPLETIONS, {"prompt": ""}, "prompt: the prompt is empty"),
        (
            "/v1/responses",
            {"input": "x", "conversation": "c"},
            "conversation is not supported: leave it out, or null",
        ),
    ],
)
async def test_a_refusal_begins_with_the_name_of_its_field_as_the_client_spells_it(
    model, path, fields, message
):
    body = json.loads(chat(**fields)) if path == CHAT else {"model": MODEL, **fields}
    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        error = (await client.post(path, json=body)).json()["error"]
    assert (error["message"], error["param"]) == (message, message.split(":")[0].split()[0])


@pytest.mark.parametrize("value", ["", "0", "-1", "1e-322", "nan", "inf", "soon"])
async def test_bound_that_is_no_time_is_refused(model, value):
    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=chat(), headers={"x-slo-ttft-ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


async def test_a_tenants_name_that_is_too_long_is_refused_by_its_headers_name(model):
    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=chat(), headers={"x-tenant-id": "t" * 257})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "x-tenant-id")
    assert error["message"] == "x-tenant-id: at most 256 characters, not 257"


async def test_unknown_paths_and_methods_are_error_objects_too(model):
    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        answers = [await client.get("/v1/nothing"), await client.get(CHAT)]
    assert [answer.status_code for answer in answers] == [404, 405]
    assert answers[1].headers["allow"] == "POST"
    assert all(answer.json()["error"]["message"] for answer in answers)


async def test_a_slash_too_many_leads_to_the_path_without_it(model):
    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(f"{CHAT}/?a=b", content=chat())
        unknown = await client.get(f"{api.url}//health/")
    assert (answer.status_code, answer.headers["location"]) == (307, f"{CHAT}?a=b")
    assert unknown.status_code == 404


@pytest.mark.parametrize("is_declared", [True, False])
async def test_long_body_is_refused_unread(model, is_declared):
    body = b"x" * (1 << 20)

    async def parts():
        for _ in range(4):
            yield body

    async with serving(model, lambda request: []) as api, httpx.AsyncClient(base_url=api.url) as client:
        answer = await client.post(CHAT, content=body * 4 if is_declared else parts())
        assert (await client.get("/health")).status_code == 200
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_call_beyond_the_limit_is_rejected_at_once(model):
    async with (
        serving(model, lambda request: [WAIT], max_calls=1) as api,
        httpx.AsyncClient(base_url=api.url) as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.post(CHAT, content=chat()))
        await api.dispatcher.until(lambda dispatcher: dispatcher.num_open == 1)
        answer = await client.post(CHAT, content=chat())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        first.cancel()
