# ruff: noqa: E501  (bodies are not broken)
"""/v1/messages, by Anthropic's own client against a real server."""

import json
import threading
import tracemalloc
from contextlib import asynccontextmanager

import httpx
import pytest

from base.errors import RejectedError
from base.request import FinishReason
from conductor.api.messages.schema import MessagesBody
from tests.conductor.api.conversing import CALL, deep, prompt_of, talking
from tests.conductor.fakes import MODEL, serving, spoken

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

QUESTION = {"role": "user", "content": "1 + 2?"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
USED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 2}}],
}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]}


@asynccontextmanager
async def asking(model, script, **spoken_options):
    async with (
        talking(model, script, **spoken_options) as api,
        anthropic.AsyncAnthropic(base_url=api.url, api_key="none", max_retries=0) as client,
    ):
        yield client.messages, api


def body(**more):
    return {"model": MODEL, "max_tokens": 1000, "messages": [QUESTION], **more}


async def test_an_answer_has_text_and_usage(plain):
    async with asking(plain, "three", num_cached_tokens=4) as (messages, api):
        answer = await messages.create(
            **body(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
        )
        num_tokens = len(api.dispatcher.requests[0].token_ids)
        prompt = prompt_of(plain, api)
    assert (
        prompt
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message",
        "assistant",
        MODEL,
        "end_turn",
    )
    assert [block.text for block in answer.content] == ["three"]
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (num_tokens - 4, 4)
    assert answer.usage.output_tokens == len(plain.tokenizer.encode("three", False)) + 1


@pytest.mark.parametrize("per_step", [1, 4, 1000])
async def test_a_stream_is_put_together_to_the_whole_answer(tooled, per_step):
    text = f"Sum.\n</think>\n\nI add.\n{CALL}\n{CALL.replace('2', '3')}"
    options = body(tools=[ADD], thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    async with asking(tooled, text, per_step=per_step) as (messages, _):
        whole = await messages.create(**options)
        async with messages.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [whole.content[0].thinking, whole.content[1].text] == ["Sum.", "I add."]
    assert [block.input for block in whole.content[2:]] == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    def bare(message):
        return [{**block.model_dump(exclude={"id"})} for block in message.content]

    assert bare(streamed) == bare(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_calls_and_results_are_given_to_the_template(tooled):
    async with asking(tooled, "3") as (messages, api):
        await messages.create(**body(messages=[QUESTION, USED, RESULT], tools=[ADD]))
    prompt = prompt_of(tooled, api)
    assert '<tool_call>add({"a": 1, "b": 2})</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>' in prompt
    assert "Adds." in prompt


async def test_a_last_message_of_the_assistant_is_gone_on_with(plain):
    async with asking(plain, "three") as (messages, api):
        await messages.create(
            **body(messages=[QUESTION, {"role": "assistant", "content": "It is <|im_end|>"}])
        )
    ids = api.dispatcher.requests[0].token_ids
    assert plain.tokenizer.decode(ids, False).endswith("<|im_start|>assistant\nIt is <|im_end|>")
    assert ids.count(plain.tokenizer.token_id_or_none("<|im_end|>")) == 1


async def test_fields_of_chats_that_ask_for_nothing_and_numbers_of_sampling_are_taken(plain):
    async with asking(plain, "three") as (messages, api):
        asked = {
            "n": 1,
            "stop": [],
            "cache_salt": "",
            "logprobs": False,
            "user": "u",
            "seed": 7,
            "min_p": 0.25,
        }
        asked |= {"response_format": {"type": "text"}, "parallel_tool_calls": True}
        asked |= {"stream_options": {"include_usage": True}, "skip_special_tokens": True}
        await messages.create(**body(extra_body=asked))
    sampling = api.dispatcher.requests[0].sampling
    assert (sampling.seed, sampling.min_p) == (7, 0.25)


async def test_a_beginning_comes_after_the_thinking_that_a_template_opens(tooled):
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    beginning = {"role": "assistant", "content": "It is "}
    async with asking(tooled, "3") as (messages, api):
        await messages.create(**body(messages=[QUESTION, beginning], extra_body=thinks))
    assert prompt_of(tooled, api).endswith("<think>\n\n</think>\n\nIt is ")


async def test_a_history_that_ends_with_the_assistant_is_counted_and_gone_on_with_after_its_thinking(tooled):
    thoughts = [{"type": "thinking", "thinking": "Sum.", "signature": ""}, {"type": "text", "text": "It is "}]
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    async with asking(tooled, "3") as (messages, api):
        for content in (thoughts, "It is "):
            history = [QUESTION, {"role": "assistant", "content": content}]
            counted = await messages.count_tokens(model=MODEL, messages=history, thinking=asked["thinking"])
            assert counted.input_tokens > 10
        history = [QUESTION, {"role": "assistant", "content": thoughts}]
        await messages.create(**body(messages=history, **asked))
        assert prompt_of(tooled, api).endswith("</think>\n\nIt is ")


@pytest.mark.parametrize(("num_chars", "is_inline"), [(20, True), (5_000, False)])
async def test_a_long_beginning_of_an_answer_is_tokenised_off_the_event_loop(
    plain, monkeypatch, num_chars, is_inline
):
    encode, threads = plain.tokenizer.encode, {}

    def encoded(text, *others, **named):
        threads[len(text) == num_chars] = threading.get_ident()
        return encode(text, *others, **named)

    monkeypatch.setattr(plain.tokenizer, "encode", encoded)
    async with asking(plain, "three") as (messages, _):
        await messages.create(
            **body(messages=[QUESTION, {"role": "assistant", "content": "word " * (num_chars // 5)}])
        )
    assert (threads[True] == threading.get_ident()) == is_inline


async def test_a_beginning_beyond_the_window_is_refused_before_it_is_tokenised(plain):
    async with asking(plain, "three") as (messages, api):
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await messages.create(
                **body(messages=[QUESTION, {"role": "assistant", "content": "word " * 150_000}])
            )
    assert api.dispatcher.requests == []


async def test_arguments_that_are_half_a_character_are_an_input(tooled):
    call = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
    async with asking(tooled, call) as (messages, _):
        answer = await messages.create(**body(tools=[ADD]))
    assert answer.content[0].input == {"a": "\ufffd"}


async def test_reasoning_is_shown_only_where_it_is_asked_for(tooled):
    async with asking(tooled, "<think>Sum.</think>3") as (messages, api):
        answer = await messages.create(**body())
        assert [block.type for block in answer.content] == ["text"]
        answer = await messages.create(**body(thinking={"type": "adaptive"}))
        assert [block.type for block in answer.content] == ["thinking", "text"]
        await messages.create(**body(thinking={"type": "disabled"}))
    assert prompt_of(tooled, api, 1).endswith("<think>\n")
    assert not prompt_of(tooled, api, 2).endswith("<think>\n")


async def test_why_an_answer_ended_is_said(plain):
    async with asking(plain, "one two three") as (messages, _):
        answer = await messages.create(**body(stop_sequences=["two"]))
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == (
            "stop_sequence",
            "two",
            "one ",
        )
    async with asking(plain, "one", finish=FinishReason.LENGTH) as (messages, _):
        assert (await messages.create(**body(max_tokens=5))).stop_reason == "max_tokens"
        answer = await messages.create(**body(max_tokens=9_000))
        assert answer.stop_reason == "model_context_window_exceeded"


def test_of_stop_sequences_those_of_spaces_are_left_out_and_none_is_copied():
    wide = "\N{GRINNING FACE}" + "a " * 500_000
    asked = MessagesBody.model_validate(body(stop_sequences=["two", " \n", "", wide], max_tokens=9))
    tracemalloc.start()
    try:
        stop = asked.options(9).stop
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stop == ("two", wide)
    assert most < len(wide)


async def test_tokens_are_counted_as_they_are_asked(tooled):
    async with asking(tooled, "x") as (messages, api):
        asked = {"model": MODEL, "messages": [QUESTION, USED, RESULT], "tools": [ADD], "system": "Be brief."}
        counted = await messages.count_tokens(**asked)
        await messages.create(**asked, max_tokens=5)
    assert counted.input_tokens == len(api.dispatcher.requests[0].token_ids)


async def test_errors_are_worded_as_clients_expect(plain):
    async with asking(plain, lambda request: [RejectedError("busy")]) as (messages, api):
        with pytest.raises(anthropic.RateLimitError) as refused:
            await messages.create(**body())
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "rate_limit_error"
        with pytest.raises(anthropic.NotFoundError):
            await messages.create(**body() | {"model": "other"})
        async with httpx.AsyncClient(base_url=api.url) as client:
            answer = await client.post("/v1/messages", content="{")
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_stream_that_fails_ends_with_an_error(plain):
    steps = lambda request: [*spoken(plain, "one two", FinishReason.LENGTH)[:3], RejectedError("lost")]  # noqa: E731
    async with asking(plain, steps) as (messages, _), messages.stream(**body()) as stream:
        with pytest.raises(anthropic.APIStatusError):
            await stream.until_done()


HOSTILE = {
    "no body": ("", None),
    "a list": ("[]", None),
    "no model": ({"model": None}, "model"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "max_tokens of none": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "a role of none": ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    "a document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
    "an image in a result": (
        {
            "messages": [
                USED,
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}],
                },
            ]
        },
        "messages[1].content[0].content[0].type",
    ),
    "a result of no call": ({"messages": [RESULT]}, "messages[0].content[0].tool_use_id"),
    "a result without an id": (
        {"messages": [USED, {"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[1].content[0].tool_use_id",
    ),
    "a call of the user's": ({"messages": [{**USED, "role": "user"}]}, "'tool_use'"),
    "a call without a name": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].name",
    ),
    "text of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    "blocks in blocks": (
        {
            "messages": [
                {"role": "user", "content": json.loads('[{"type":"text","content":' * 90 + "[]" + "}]" * 90)}
            ]
        },
        "messages[0]",
    ),
    "too many blocks": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9_000}]},
        "messages[0].content",
    ),
    "a tool of the provider's": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a schema of a list": (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema.type",
    ),
    "a depth bomb": ({"tools": [{"name": "f", "input_schema": deep(60)}]}, "tools[0]"),
    "two of one name": ({"tools": [ADD, ADD]}, "twice"),
    "a choice of none": ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "a choice without a name": ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "an unknown choice": ({"tools": [ADD], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    "a budget of none": ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    "a server of tools": ({"mcp_servers": [{}]}, "mcp_servers"),
    "a temperature of text": ({"temperature": "hot"}, "temperature"),
    "a temperature of fire": ({"temperature": 99}, "temperature"),
    "a seed that is no whole number": ({"seed": 1.5}, "seed"),
    "a seed of text": ({"seed": "x"}, "seed"),
    "a bound of a list": ({"min_p": [1]}, "min_p"),
    "a penalty of text": ({"repetition_penalty": "1.0"}, "repetition_penalty"),
    "a penalty of a table": ({"presence_penalty": {}}, "presence_penalty"),
    "several answers": ({"n": 2}, "n is not supported"),
    "a chat's stop": ({"stop": "x"}, "stop is not supported"),
    "a chat's form": ({"response_format": {"type": "json_object"}}, "response_format"),
    "a salt": ({"cache_salt": "mine"}, "cache_salt"),
    "a form behind a beginning": (
        {
            "messages": [QUESTION, {"role": "assistant", "content": "{"}],
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "messages",
    ),
    "a demanded call behind a beginning": (
        {
            "messages": [QUESTION, {"role": "assistant", "content": "{"}],
            "tools": [ADD],
            "tool_choice": {"type": "any"},
        },
        "messages",
    ),
    "thinking behind a beginning": (
        {
            "messages": [QUESTION, {"role": "assistant", "content": "{"}],
            "thinking": {"type": "enabled", "budget_tokens": 9},
        },
        "messages",
    ),
    "many stops": ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    "a long conversation": ({"messages": [{"role": "user", "content": "x" * 900_000}]}, "prompt"),
    "an output of a form": ({"output_format": {"type": "xml"}}, "output_format"),
}


async def test_hostile_bodies_are_refused_by_field(plain):
    async with (
        serving(plain, lambda request: spoken(plain, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        for what, (given, field) in HOSTILE.items():
            content = (
                given
                if isinstance(given, str)
                else json.dumps({k: v for k, v in body(**given).items() if v is not None})
            )
            answer = await client.post("/v1/messages", content=content)
            error = answer.json()
            assert (answer.status_code, error["type"]) == (400, "error"), what
            assert field is None or field in error["error"]["message"], (what, error)
        assert api.dispatcher.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/b1", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
    ],
)
async def test_what_is_not_served_below_messages_is_an_error_of_the_same_form(
    plain, method, path, status, kind
):
    async with (
        serving(plain, lambda request: []) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        answer = await client.request(method, path)
        elsewhere = await client.request(method, "/v1/messages-and-more")
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert "type" not in elsewhere.json()
    assert ("allow" in answer.headers) == (status == 405)
