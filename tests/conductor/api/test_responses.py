# ruff: noqa: E501  (bodies are not broken)
"""/v1/responses, by the official client against a real server."""

import json
from array import array
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from base.errors import InvalidRequestError, RejectedError
from base.request import FinishReason
from conductor.api.chat_template import ChatMessage, PastCall
from conductor.api.openai_tools import past_arguments
from conductor.api.responses.held import HELD_S, HeldResponse, HeldResponses
from tests.conductor.api.conversing import CALL, WITH_TOOLS, deep, long_model, prompt_of, talking
from tests.conductor.fakes import CHAT_TEMPLATE, MODEL, serving, spoken
from tests.manual_clock import ManualClock
from tests.memory import kept_bytes

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALLED = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
NESTED = '{"a":' * 600 + "1" + "}" * 600
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


@asynccontextmanager
async def asking(model, script, **spoken_options):
    async with (
        talking(model, script, **spoken_options) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client.responses, api


async def test_an_answer_has_text_and_usage(plain):
    async with asking(plain, "three", num_cached_tokens=4) as (responses, api):
        answer = await responses.create(model=MODEL, input="1 + 2?", instructions="Be brief.")
        num_tokens = len(api.dispatcher.requests[0].token_ids)
        prompt = prompt_of(plain, api)
    assert (
        prompt
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "three")
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (num_tokens, 4)


@pytest.mark.parametrize("per_step", [1, 4, 1000])
async def test_a_stream_brings_the_whole_answer(tooled, per_step):
    text = f"<think>Sum.</think>I add.\n{CALL}\n{CALL.replace('2', '3')}"
    async with asking(tooled, text, per_step=per_step) as (responses, _):
        whole = await responses.create(model=MODEL, input="1 + 2?", tools=[ADD])
        events = [
            event
            async for event in await responses.create(model=MODEL, input="1 + 2?", tools=[ADD], stream=True)
        ]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in whole.output[2:]] == ['{"a": 1, "b": 2}', '{"a": 1, "b": 3}']
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def bare(items):
        return [item.model_dump(exclude={"id", "call_id"}) for item in items]

    assert bare(events[-1].response.output) == bare(whole.output)
    deltas = {}
    for event in events:
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    assert deltas == {1: "I add.", 2: '{"a": 1, "b": 2}', 3: '{"a": 1, "b": 3}'}


async def test_items_are_given_to_the_template_as_turns(tooled):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Sum."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        CALLED,
        OUTPUT,
    ]
    async with asking(tooled, "3") as (responses, api):
        await responses.create(model=MODEL, input=items, tools=[ADD])
    prompt = prompt_of(tooled, api)
    assert (
        '<|im_start|>assistant\nI add.<tool_call>add({"a": 1, "b": 2})</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>'
        in prompt
    )


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_TOOLS])
async def test_a_response_is_gone_on_from_by_its_tokens(tmp_path, template):
    model = long_model(tmp_path, template)
    async with asking(model, "I am <|im_end|> here") as (responses, api):
        first = await responses.create(model=MODEL, input="one", tools=[ADD])
        second = await responses.create(
            model=MODEL, input="two <|im_end|>", tools=[ADD], previous_response_id=first.id
        )
        await responses.create(model=MODEL, input="three", tools=[ADD], previous_response_id=second.id)
        await responses.create(model=MODEL, input="other", tools=[ADD], previous_response_id=first.id)
    one, two, three, other = (request.token_ids for request in api.dispatcher.requests)
    answer = model.tokenizer.encode("I am <|im_end|> here", False)
    end = model.tokenizer.encode("<|im_end|>\n<|im_start|>user\n", False)
    assert two[: len(one) + len(answer) + len(end)] == (*one, *answer, *end)
    assert three[: len(two)] == two
    assert other[: len(one) + len(answer)] == (*one, *answer)
    special = model.tokenizer.token_id_or_none("<|im_end|>")
    assert (
        two.count(special) == one.count(special) + answer.count(special) + 2
    )  # what the user spelled stays text
    assert "two <|im_end|><|im_end|>" in model.tokenizer.decode(two, False)


async def test_responses_to_one_request_id_of_a_client_are_two(plain):
    same = {"X-Request-Id": "mine"}
    async with asking(plain, "yes") as (responses, api):
        first = await responses.create(model=MODEL, input="one", extra_headers=same)
        second = await responses.create(model=MODEL, input="two", extra_headers=same)
        await responses.create(model=MODEL, input="three", previous_response_id=first.id)
    assert first.id != second.id
    assert {item.id for item in first.output}.isdisjoint(item.id for item in second.output)
    one, _, three = (request.token_ids for request in api.dispatcher.requests)
    assert three[: len(one)] == one


def test_a_response_that_is_held_again_is_counted_once():
    held = HeldResponses(ManualClock())
    for text in ("a", "bb"):
        held.hold("t", "resp", HeldResponse(array("I", [1]), (ChatMessage("user", text),), b""))
        held.check()
    assert held.find("t", "resp").messages[0].content == "bb"


async def test_calls_of_a_held_response_can_be_answered(tooled):
    async with asking(tooled, CALL) as (responses, api):
        first = await responses.create(model=MODEL, input="1 + 2?", tools=[ADD])
        output = {**OUTPUT, "call_id": first.output[0].call_id}
        await responses.create(model=MODEL, input=[output], tools=[ADD], previous_response_id=first.id)
        await responses.create(
            model=MODEL, input=[output], previous_response_id=first.id, instructions="Be brief."
        )
    assert prompt_of(tooled, api, 1).endswith(
        f"{CALL}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    anew = prompt_of(tooled, api, 2)
    assert anew.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert '<tool_call>add({"a": 1, "b": 2})</tool_call><|im_end|>' in anew


async def test_what_is_not_stored_or_anothers_cannot_be_gone_on_from(plain):
    async with asking(plain, "x") as (responses, _):
        unstored = await responses.create(model=MODEL, input="x", store=False)
        stored = await responses.create(model=MODEL, input="x", extra_headers={"x-tenant-id": "a"})
        for response_id in (unstored.id, stored.id, "resp_none"):
            with pytest.raises(openai.BadRequestError) as refused:
                await responses.create(model=MODEL, input="x", previous_response_id=response_id)
            assert refused.value.param == "previous_response_id"
        await responses.create(
            model=MODEL, input="x", previous_response_id=stored.id, extra_headers={"x-tenant-id": "a"}
        )


def held(num_tokens=10, *more):
    return HeldResponse(array("I", range(num_tokens)), (ChatMessage("user", "x"), *more), b"")


@pytest.mark.full
def test_a_response_is_charged_with_the_memory_that_it_takes():
    deep_arguments = json.dumps(
        {"a": [[] for _ in range(10_000)], "b": {str(key): [1.5] for key in range(3_000)}}
    )
    for make in (
        lambda: held(100_000),
        lambda: held(1, ChatMessage("user", "x" * 99_999 + "\N{GRINNING FACE}")),
        lambda: held(
            1, ChatMessage("assistant", "", calls=(PastCall("c", "f", past_arguments(deep_arguments, "")),))
        ),
        lambda: held(1, *(ChatMessage("user", str(number)) for number in range(1_000))),
    ):
        make()
        kept, taken = kept_bytes(make, __file__)
        assert taken <= kept.num_bytes <= 6 * taken


async def test_a_held_response_keeps_nothing_of_the_variables_and_tools(plain, monkeypatch):
    hold, held = HeldResponses.hold, []

    def held_too(self, tenant, response_id, response):
        held.append(response)
        hold(self, tenant, response_id, response)

    monkeypatch.setattr(HeldResponses, "hold", held_too)
    async with asking(plain, "x") as (responses, api):
        for more in ({}, {"tools": [ADD]}, {"extra_body": {"chat_template_kwargs": {"a": "y" * 100_000}}}):
            first = await responses.create(model=MODEL, input="one", **more)
            assert len(repr(held[-1])) < 8_000
            await responses.create(
                model=MODEL, input="two", previous_response_id=first.id, store=False, **more
            )
            one, two = (request.token_ids for request in api.dispatcher.requests[-2:])
            assert two[: len(one)] == one


def test_held_responses_leave_by_age_and_make_room_within_their_tenant_first():
    clock, size = ManualClock(), held().num_bytes
    responses = HeldResponses(clock, max_bytes=4 * size, max_tenant_bytes=2 * size)
    for tenant, name in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "3"), ("b", "2")):
        responses.hold(tenant, name, held())
        responses.check()
    with pytest.raises(InvalidRequestError):
        responses.find("a", "1")
    assert responses.find("a", "2") == responses.find("b", "1") == held()
    responses.hold("c", "1", held())
    responses.check()
    with pytest.raises(InvalidRequestError):
        responses.find("a", "2")  # the oldest of all
    responses.hold("c", "big", held(100_000))
    with pytest.raises(InvalidRequestError):
        responses.find("c", "big")
    clock.advance(HELD_S + 1)
    with pytest.raises(InvalidRequestError):
        responses.find("c", "1")
    responses.check()
    assert responses.num_bytes == 0


def test_room_for_a_response_is_made_by_a_bounded_number_of_others():
    responses = HeldResponses(ManualClock())
    for number in range(10_000):
        responses.hold("a", str(number), HeldResponse(array("I"), (), b""))
    responses.check()
    assert responses.num_bytes <= 16 << 20
    assert len(responses._ids_of["a"]) <= (16 << 20) // 4096


async def test_tools_that_the_model_is_not_offered_are_not_repeated(plain):
    tool = {**ADD, "description": "x" * 100_000}
    async with asking(plain, "yes") as (responses, _):
        none = await responses.create(model=MODEL, input="x", tools=[tool], tool_choice="none")
        chosen = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add", "more": "y" * 1000}]}
        some = await responses.create(model=MODEL, input="x", tools=[ADD], tool_choice=chosen)
    assert none.tools == []
    assert [tool.name for tool in some.tools] == ["add"]
    assert len(some.model_dump_json()) < 3_000


async def test_what_a_template_refuses_after_an_answer_is_rendered_anew(tmp_path):
    strict = WITH_TOOLS.replace(
        "{% for message in messages %}",
        "{% set seen = namespace(call=false) %}{% for message in messages %}"
        "{% if message.role == 'tool' and not seen.call %}{{ raise_exception('no call before it') }}{% endif %}"
        "{% if message.tool_calls %}{% set seen.call = true %}{% endif %}",
    )
    model = long_model(tmp_path, strict)
    async with asking(model, CALL) as (responses, api):
        first = await responses.create(model=MODEL, input="1 + 2?", tools=[ADD])
        output = {**OUTPUT, "call_id": first.output[0].call_id}
        await responses.create(model=MODEL, input=[output], tools=[ADD], previous_response_id=first.id)
    assert prompt_of(model, api, 1).endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")


async def test_reasoning_that_is_closed_is_closed_in_the_next_prompt_too(tooled):
    def script(request):
        said = tooled.tokenizer.decode(request.token_ids, False)
        return spoken(tooled, "the answer" if said.endswith("</think>\n\n") else "<think>long thoughts")

    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    async with asking(tooled, script) as (responses, api):
        asked = {"model": MODEL, "reasoning": {"effort": "none"}, "extra_body": {}}
        first = await responses.create(input="one", **asked)
        await responses.create(input="two", previous_response_id=first.id, **asked)
        assert "</think>\n\nthe answer<|im_end|>" in prompt_of(tooled, api, -1)
        form = {"model": MODEL, "extra_body": thinks}
        first = await responses.create(input="one", text={"format": {"type": "json_object"}}, **form)
        await responses.create(input="two", previous_response_id=first.id, **form)
    assert "<think>\n\n</think>\n\nthe answer<|im_end|>" in prompt_of(tooled, api, -1)


async def test_an_answer_that_is_cut_off_is_incomplete(plain):
    async with asking(plain, "one", finish=FinishReason.LENGTH) as (responses, _):
        answer = await responses.create(model=MODEL, input="x", max_output_tokens=3)
        events = [event async for event in await responses.create(model=MODEL, input="x", stream=True)]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"
    ended = next(event for event in events if event.type == "response.output_item.done")
    assert ended.item == events[-1].response.output[0]
    assert (ended.item.status, answer.output[0].status) == ("incomplete", "incomplete")


async def test_a_stream_that_fails_ends_with_an_error(plain):
    def steps(request):
        return [*spoken(plain, "one two", FinishReason.LENGTH)[:3], RejectedError("lost")]

    async with asking(plain, steps) as (responses, _):
        stream = await responses.create(model=MODEL, input="x", stream=True)
        with pytest.raises(openai.APIError):
            [event async for event in stream]


HOSTILE = {
    "no body": ("", None),
    "no model": ({"model": None}, "model"),
    "no input": ({"input": []}, "input"),
    "input of a number": ({"input": 5}, "input"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    "audio": (
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "input[0].content[0].type",
    ),
    "a file": (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    "a refusal without one": (
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]},
        "input[0].content[0].refusal",
    ),
    "a text without one": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "an item of nothing": ({"input": [{}]}, "input[0].type"),
    "a role of none": ({"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "an output of no call": ({"input": [OUTPUT]}, "input[0].call_id"),
    "an output before its call": ({"input": [OUTPUT, CALLED]}, "input[0].call_id"),
    "an output without an id": (
        {"input": [CALLED, {"type": "function_call_output", "output": "x"}]},
        "input[1].call_id",
    ),
    "an output of nothing": (
        {"input": [CALLED, {"type": "function_call_output", "call_id": "c1"}]},
        "input[1].output",
    ),
    "a call without a name": ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    "a call of a list": ({"input": [{**CALLED, "arguments": "[]"}]}, "input[0].arguments"),
    "a call of a bomb": ({"input": [{**CALLED, "arguments": "[" * 10_000}]}, "input[0].arguments"),
    "calls of many values": (
        {"input": [{**CALLED, "arguments": '{"a": [' + "1," * 10_000 + "1]}"}] * 30},
        "input",
    ),
    "too many items": ({"input": [{"role": "user", "content": "x"}] * 3_000}, "input"),
    "a tool of the provider's": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a depth bomb": ({"tools": [{**ADD, "parameters": deep(60)}]}, "tools[0].parameters"),
    "a choice of none": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of no tool": (
        {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        "tool_choice",
    ),
    "a call of a small bomb": ({"input": [{**CALLED, "arguments": NESTED}]}, "input[0].arguments"),
    "many variables": ({"chat_template_kwargs": {"x": "y" * 200_000}}, "chat_template_kwargs"),
    "in the background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "x"}, "conversation"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "an effort of none": ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    "tokens of none": ({"max_output_tokens": 0}, "max_output_tokens"),
    "a temperature of fire": ({"temperature": 99}, "temperature"),
    "metadata of numbers": (
        {"metadata": {"a": 1}, "input": [{"role": "user", "content": "x"}]},
        "metadata",
    ),
    "metadata of numbers beside a text": ({"metadata": {"a": 1}}, "metadata"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata"),
    "metadata of a long name": ({"metadata": {"x" * 65: "a"}}, "metadata"),
    "a form that is no JSON": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": "{nope"}}},
        "text.format.schema",
    ),
    "a form of a bomb": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": "[" * 5000}}},
        "text.format.schema",
    ),
    "a form of a long name": (
        {"text": {"format": {"type": "text", "name": "x" * 5000}}},
        "text.format.name",
    ),
    "a short answer": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "several answers": ({"n": 2}, "n"),
    "a chat's stop": ({"stop": "x"}, "stop"),
    "a chat's bound": ({"max_tokens": 9}, "max_tokens"),
    "a salt": ({"cache_salt": "mine"}, "cache_salt"),
    "a seed of text": ({"seed": "x"}, "seed"),
    "a result that is no output": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "a long id": ({"previous_response_id": "x" * 300}, "previous_response_id"),
    "an id that is not held": ({"previous_response_id": "x"}, "previous_response_id"),
}


async def test_hostile_bodies_are_refused_by_field(plain):
    async with (
        serving(plain, lambda request: spoken(plain, "hi")) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        for what, (given, param) in HOSTILE.items():
            whole = {"model": MODEL, "input": "x", **given} if isinstance(given, dict) else {}
            content = json.dumps({k: v for k, v in whole.items() if v is not None}) if whole else given
            answer = await client.post("/v1/responses", content=content)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                what,
                answer.json(),
            )
        assert api.dispatcher.requests == []
