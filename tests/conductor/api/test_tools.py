"""Tools and reasoning in /v1/chat/completions, by the official client against a real server."""

import json
import sys
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from base.errors import InvalidRequestError
from base.request import FinishReason
from conductor.api.openai_tools import check_json_texts
from conductor.api.parsing.forced import closed, demanded_schema
from tests.conductor.api.conversing import CALL, WITH_TOOLS, deep, long_model, prompt_of, talking
from tests.conductor.fakes import CHAT_TEMPLATE, MODEL, serving, spoken

QUESTION = {"role": "user", "content": "1 + 2?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@asynccontextmanager
async def chatting(model, text, **spoken_options):
    async with (
        talking(model, text, **spoken_options) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def ask(**body):
            return await client.chat.completions.create(**{"model": MODEL, "messages": [QUESTION], **body})

        yield ask, api


async def put_together(stream):
    """The message that a client makes of a stream, and its finish reasons."""
    message = {"content": "", "reasoning_content": "", "calls": []}
    reasons = []
    async for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.index == len(message["calls"]):
                    assert call.id
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return message, reasons


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_calls_are_parted_from_the_text_and_streams_equal_whole_answers(plain, per_step):
    text = f"<think>\nSum.\n</think>\n\nI add.\n{CALL}\n{CALL.replace('2', '3')}"
    async with chatting(plain, text, per_step=per_step) as (ask, _):
        whole = (await ask(tools=[ADD])).choices[0]
        message, reasons = await put_together(await ask(tools=[ADD], stream=True))
    calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert calls == [["add", '{"a": 1, "b": 2}'], ["add", '{"a": 1, "b": 3}']]
    assert (whole.message.content, whole.message.reasoning_content) == ("I add.", "Sum.")
    assert whole.finish_reason == "tool_calls"
    assert message == {"content": "I add.", "reasoning_content": "Sum.", "calls": calls}
    assert reasons == ["tool_calls"]
    assert len({call.id for call in whole.message.tool_calls}) == 2


async def test_a_call_that_a_limit_cuts_off_is_none(plain):
    async with chatting(plain, f"Yes. {CALL[:-20]}", finish=FinishReason.LENGTH) as (ask, _):
        choice = (await ask(tools=[ADD])).choices[0]
        message, reasons = await put_together(await ask(tools=[ADD], stream=True))
    assert (choice.message.content, choice.message.tool_calls) == ("Yes.", None)
    assert choice.finish_reason == "length"
    assert (message["content"], message["calls"], reasons) == ("Yes.", [], ["length"])


async def test_a_demanded_call_that_a_stop_string_cuts_off_is_not_to_be_run(plain):
    said = '[{"name": "add", "arguments": {"a": "hello world"}}]'
    async with chatting(plain, said) as (ask, _):
        asked = {"tools": [ADD], "tool_choice": "required", "stop": ["world"]}
        choice = (await ask(**asked)).choices[0]
        _, reasons = await put_together(await ask(**asked, stream=True))
    assert (choice.finish_reason, reasons) == ("stop", ["stop"])


async def test_one_call_alone_ends_the_answer(plain):
    async with chatting(plain, CALL + CALL) as (ask, api):
        choice = (await ask(tools=[ADD], parallel_tool_calls=False)).choices[0]
        assert len(choice.message.tool_calls) == 1
        assert choice.finish_reason == "tool_calls"
        message, _ = await put_together(await ask(tools=[ADD], parallel_tool_calls=False, stream=True))
        assert len(message["calls"]) == 1
        assert api.dispatcher.num_open == 0
        assert 'conductor_sequences_total{outcome="stop"} 2.0' in await api.metrics()


async def test_tools_and_their_results_are_given_to_the_template(tooled):
    history = [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,"b": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    async with chatting(tooled, "3") as (ask, api):
        await ask(messages=history, tools=[ADD])
        prompt = prompt_of(tooled, api)
        await ask(messages=history, tools=[ADD], tool_choice="none")
        without = prompt_of(tooled, api, 1)
    assert json.dumps(ADD["function"]["parameters"]) in prompt
    assert '<tool_call>add({"a": 1, "b": 2})</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>' in prompt
    assert "Adds." not in without


async def test_a_model_without_a_place_for_tools_has_them_in_words(plain):
    history = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,"b": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    async with chatting(plain, "3") as (ask, api):
        await ask(messages=history, tools=[ADD])
        prompt = prompt_of(plain, api)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in prompt


async def test_special_tokens_in_tools_and_calls_stay_text(tooled):
    spelled = "<|im_end|>"
    special = tooled.tokenizer.token_id_or_none(spelled)
    tool = {
        "type": "function",
        "function": {"name": "f", "description": spelled, "parameters": {spelled: spelled}},
    }
    call = {
        "id": spelled,
        "type": "function",
        "function": {"name": spelled, "arguments": json.dumps({spelled: spelled})},
    }
    history = [
        {"role": "assistant", "content": spelled, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": spelled, "content": spelled},
    ]
    async with chatting(tooled, "x") as (ask, api):
        await ask(messages=[QUESTION, *history], tools=[tool])
    assert api.dispatcher.requests[0].token_ids.count(special) == 4  # one for the tools and each message


async def test_reasoning_that_the_prompt_opened_is_known_and_can_be_hidden(tooled):
    async with chatting(tooled, "Sum.\n</think>\n\n3") as (ask, _):
        shown = (await ask(reasoning_effort="low")).choices[0].message
        assert (shown.reasoning_content, shown.content) == ("Sum.", "3")
        hidden = (
            (await ask(reasoning_effort="low", extra_body={"include_reasoning": False})).choices[0].message
        )
        assert (getattr(hidden, "reasoning_content", None), hidden.content) == (None, "3")


async def test_reasoning_that_exceeds_its_budget_is_ended_and_the_answer_goes_on(tooled):
    text = "one two three four"

    def script(request):
        thinks = b"</think>" not in bytes(tooled.tokenizer.decode(request.token_ids, False), "utf-8")
        return spoken(tooled, text if thinks else "the answer")

    async with (
        serving(tooled, script) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        body = {"model": MODEL, "messages": [QUESTION], "extra_body": {"thinking_token_budget": 7}}
        whole = (await client.chat.completions.create(**body)).choices[0]
        message, _ = await put_together(await client.chat.completions.create(**body, stream=True))
    assert (whole.message.reasoning_content, whole.message.content) == ("one two", "the answer")
    assert (message["reasoning_content"], message["content"]) == ("one two", "the answer")
    first, second = api.dispatcher.requests[:2]
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert "one two\n</think>\n\n" in tooled.tokenizer.decode(second.token_ids, False)


@pytest.mark.parametrize(("max_tokens", "num_chars"), [(4, 1), (None, 8160)])
async def test_reasoning_that_is_ended_where_no_token_is_left_ends_the_answer(tooled, max_tokens, num_chars):
    async with chatting(tooled, "one two three four", num_cached_tokens=3) as (ask, api):
        asked = {"extra_body": {"thinking_token_budget": 4}, "max_tokens": max_tokens}
        answer = await ask(messages=[{"role": "user", "content": "x" * num_chars}], **asked)
    assert len(api.dispatcher.requests) == 1
    assert answer.choices[0].finish_reason == "length"


async def test_tokens_of_the_prompt_that_were_cached_are_those_of_the_first_request(tooled):
    def script(request):
        thinks = "</think>" not in tooled.tokenizer.decode(request.token_ids, False)
        num_cached = 3 if thinks else len(request.token_ids) - 1
        return spoken(tooled, "one two three" if thinks else "3", num_cached_tokens=num_cached)

    async with chatting(tooled, script) as (ask, api):
        answer = await ask(extra_body={"thinking_token_budget": 4})
    assert len(api.dispatcher.requests) == 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_no_reasoning_is_asked_of_the_template_and_closed_where_it_is_open(tooled):
    async with chatting(tooled, "3") as (ask, api):
        await ask(reasoning_effort="none")
        await ask(extra_body={"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": True}})
        assert not prompt_of(tooled, api).endswith("<think>\n")
        assert prompt_of(tooled, api, 1).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ("required", ["add", "now"], 8),
        ({"type": "function", "function": {"name": "now"}}, ["now"], 8),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
            ["add"],
            8,
        ),
    ],
)
async def test_calls_that_are_demanded_are_held_to_by_a_grammar(plain, choice, names, most):
    said = '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]'
    async with chatting(plain, said) as (ask, api):
        whole = (await ask(tools=[ADD, NOW], tool_choice=choice)).choices[0]
        message, reasons = await put_together(await ask(tools=[ADD, NOW], tool_choice=choice, stream=True))
        await ask(tools=[ADD, NOW], tool_choice=choice, parallel_tool_calls=False)
    calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert calls == message["calls"] == [["add", '{"a": 1}'], ["now", "{}"]]
    assert [whole.finish_reason] == reasons == ["tool_calls"]
    grammars = [json.loads(request.sampling.grammar.source) for request in api.dispatcher.requests]
    assert [item["properties"]["name"]["const"] for item in grammars[0]["items"]["anyOf"]] == names
    assert [grammar["maxItems"] for grammar in grammars] == [most, most, 1]


async def test_an_answer_has_one_form(plain):
    async with chatting(plain, "[]") as (ask, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(tools=[NOW], tool_choice="required", response_format={"type": "json_object"})
        assert refused.value.param == "tool_choice"


def test_references_of_a_schema_hold_where_it_is_put():
    schema = {
        "$defs": {"x": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}},
    }
    whole = json.loads(demanded_schema({"f": schema}, is_parallel=True))
    moved = whole["$defs"]["tool0"]
    assert moved["properties"] == {"a": {"$ref": "#/$defs/tool0/$defs/x"}, "b": {"$ref": "#/$defs/tool0"}}


A = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        ({"properties": A}, True),
        ({"type": "object", "properties": A, "required": ["a"]}, True),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {}}, False),
        ({"properties": A, "additionalProperties": True}, False),
        ({"properties": A, "additionalProperties": {"type": "string"}}, False),
        ({"properties": A, "patternProperties": {"^x": {}}}, False),
        ({"properties": A, "minProperties": 3}, False),
        ({"properties": A, "required": ["b"]}, False),
        ({"properties": A, "anyOf": [{"required": ["b"]}]}, False),
        ({"allOf": [{"properties": A}, {"properties": {"b": {}}}]}, False),
        ({"properties": {"not": {"type": "integer"}}}, False),
        ({"properties": {"x": {"const": {"properties": A}}}}, True),
    ],
)
def test_arguments_that_a_schema_does_not_name_are_none(schema, is_closed):
    found = closed(schema)
    if is_closed:
        assert found == {**schema, "additionalProperties": False}
    else:
        assert found == schema


def test_schemas_within_a_schema_are_closed_too():
    inner = {"type": "object", "properties": A}
    schema = {
        "properties": {
            "list": {"items": inner},
            "maybe": {"anyOf": [inner, {"type": "null"}]},
            "properties": inner,
        },
        "$defs": {"x": inner},
    }
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "properties": {
            "list": {"items": shut},
            "maybe": {"anyOf": [shut, {"type": "null"}]},
            "properties": shut,
        },
        "$defs": {"x": shut},
        "additionalProperties": False,
    }


def test_a_schema_of_great_depth_stays_open():
    schema = deep(1000)
    assert closed(schema) == schema


async def test_a_family_can_be_named(tmp_path):
    model = long_model(tmp_path, WITH_TOOLS, "mistral")
    async with chatting(model, '[TOOL_CALLS]add[ARGS]{"a": 1}') as (ask, _):
        call = (await ask(tools=[ADD])).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments, len(call.id)) == ("add", '{"a": 1}', 9)


PAST = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def past(arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


HOSTILE = {
    "a tool of another type": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a custom tool": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "an empty name": ({"tools": [tool(name="")]}, "tools[0].function.name"),
    "a name of marks": ({"tools": [tool(name="a b<|im_end|>")]}, "tools[0].function.name"),
    "a long name": ({"tools": [tool(name="f" * 129)]}, "tools[0].function.name"),
    "parameters of no object": (
        {"tools": [tool(parameters={"type": "array"})]},
        "tools[0].function.parameters.type",
    ),
    "parameters that are a text": ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    "a depth bomb": ({"tools": [tool(parameters=deep(60))]}, "tools[0].function.parameters"),
    "two of one name": ({"tools": [tool(), tool()]}, "tools"),
    "too many tools": ({"tools": [NOW] * 2_000}, "tools"),
    "a choice of none": (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    "a choice without a name": (
        {"tools": [NOW], "tool_choice": {"type": "function"}},
        "tool_choice.function",
    ),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "an unknown choice": ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    "allowed tools that are none": (
        {
            "tools": [NOW],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}},
        },
        "tool_choice.allowed_tools.tools[0]",
    ),
    "a result without an id": (
        {"messages": [PAST, {"role": "tool", "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "a result of no call": (
        {"messages": [PAST, {"role": "tool", "tool_call_id": "d", "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "a result before its call": (
        {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}, PAST]},
        "messages[0].tool_call_id",
    ),
    "a long id": (
        {"messages": [PAST, {"role": "tool", "tool_call_id": "c" * 300, "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "calls of a user": ({"messages": [{**PAST, "role": "user"}]}, "messages[0].tool_calls"),
    "arguments that are no JSON": ({"messages": [past("{")]}, "messages[0].tool_calls[0].function.arguments"),
    "arguments that are a list": ({"messages": [past("[]")]}, "messages[0].tool_calls[0].function.arguments"),
    "arguments that are a bomb": (
        {"messages": [past("[" * 10_000)]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments that are a small bomb": (
        {"messages": [past('{"a":' * 600 + "1" + "}" * 600)]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments with no number": (
        {"messages": [past('{"a": NaN}')]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "allowed tools of which none may be called": (
        {
            "tools": [NOW],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
        },
        "tool_choice",
    ),
    "many variables": ({"chat_template_kwargs": {"x": "y" * 200_000}}, "chat_template_kwargs"),
    "arguments of many lists": ({"messages": [past("[" * 100_000)]}, "messages"),
    "arguments of many values in each of many calls": (
        {"messages": [past(json.dumps({"a": [1] * 10_000}))] * 30},
        "messages",
    ),
    "too many calls": (
        {"messages": [{"role": "assistant", "tool_calls": PAST["tool_calls"] * 200}]},
        "messages[0].tool_calls",
    ),
    "a budget below zero": ({"thinking_token_budget": -1}, "thinking_token_budget"),
    "an unknown effort": ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    "nothing said": ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    "an image in a result": (
        {"messages": [PAST, {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0].type",
    ),
    "a tool of special tokens": ({"tools": [tool(description="<|im_end|>" * 9_000)]}, "messages"),
    "messages of special tokens": (
        {"messages": [{"role": "user", "content": "<|im_end|>" * 100}] * 90},
        "messages",
    ),
    "variables of special tokens": ({"chat_template_kwargs": {"x": "<|im_end|>" * 9_000}}, "messages"),
    "tools that fill the window": ({"tools": [tool(description="x" * 600_000)]}, "messages"),
}


def test_json_within_texts_is_bounded_before_it_is_parsed():
    with pytest.raises(InvalidRequestError, match="at most 1048576 characters"):
        check_json_texts(['"' + "x" * (1 << 19) + '"'] * 2, "messages")
    check_json_texts(['"\ud800"'], "messages")  # a surrogate alone is no reason to fail


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"\\uD83D x": ["\\udc00\\ud83d\\ude00"]}', {"\ufffd x": ["\ufffd\N{GRINNING FACE}"]}),
        ('{"a": -1e999}', {"a": -sys.float_info.max}),
    ],
)
async def test_what_no_text_or_json_can_hold_is_exchanged_in_calls(tooled, written, shown):
    call = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    async with chatting(tooled, call) as (ask, api):
        said = (await ask(tools=[NOW])).choices[0].message.tool_calls[0]
        await ask(messages=[QUESTION, past(written), past(said.function.arguments)], tools=[NOW])
    assert json.loads(said.function.arguments) == shown
    assert prompt_of(tooled, api, 1).count(f"f({json.dumps(shown, ensure_ascii=False)})") == 2


async def test_special_tokens_in_variables_stay_text(tmp_path):
    model = long_model(tmp_path, "{{ rule }}{{ bos_token }}" + CHAT_TEMPLATE)
    special = model.tokenizer.token_id_or_none("<|im_end|>")
    counts = []
    for variables in ({}, {"rule": "<|im_end|>", "bos_token": "<|im_end|>"}):
        async with chatting(model, "x") as (ask, api):
            await ask(extra_body={"chat_template_kwargs": variables})
        counts.append(api.dispatcher.requests[0].token_ids.count(special))
    assert counts[0] == counts[1]


async def test_hostile_tools_are_refused_by_field(plain):
    async with (
        serving(plain, lambda request: spoken(plain, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        for what, (body, param) in HOSTILE.items():
            answer = await client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [QUESTION], **body}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), what
        assert api.dispatcher.requests == []
