"""Calls that come in parts are those of the whole answer, wherever it is split, in every API."""

import json
import random
from itertools import pairwise

import pytest

from base.request import FinishReason
from conductor.api.answer_blocks import AnswerBlocks
from conductor.api.completion import Piece
from conductor.api.messages.blocks import MESSAGE_WORDS, content
from conductor.api.openai_message import CHAT_WORDS, chat_message
from conductor.api.parsing.answer import AnswerParser, joined
from conductor.api.parsing.events import Argued, Called, Calling, Said
from conductor.api.parsing.families import FORMS
from conductor.api.parsing.forced import DEMANDED
from conductor.api.responses.items import OutputItems
from tests.conductor.api.parsing.answers import ANSWERS, BETWEEN, SCHEMAS

VALUES = [
    {},
    {"a": 1, "b": 2.5},
    {"text": 'a "quote" {[ \\ \u00e9\u65e5 \N{GRINNING FACE} <tool_call>', "tags": [[], {"x": {}}]},
    {"deep": [[[[[{"a": [1, 2, {"b": None}]}]]]]]},
]
TEXTS = [
    json.dumps([{"name": "say", "arguments": value}], ensure_ascii=is_ascii, **layout)
    for value in VALUES
    for is_ascii, layout in ((True, {}), (False, {"separators": (",", ":")}), (False, {"indent": 2}))
]
TEXTS += [
    json.dumps([{"name": name, "arguments": value} for name, value in zip("abcd", VALUES, strict=True)]),
    json.dumps([{"arguments": {"a": 1}, "name": "the other way round"}, {"name": "b", "arguments": {}}]),
    '[{"name": "twice", "arguments": {"a": 1, "a": 2}}]',
    '[{"name": "a", "arguments": 5}]',
    "no list at all",
]


def pushed(form, pieces, is_cut=False, is_thinking=False):
    """Return the events that each piece brings, and at last those of the end."""
    parser = AnswerParser(form, SCHEMAS, is_thinking)
    return [*(parser.push(piece) for piece in pieces), parser.finish(is_cut)]


def splits(text):
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def call_id(name, index):
    return f"{name}{index}"


def piece(events, is_last=False, is_cut=False):
    reason = (FinishReason.LENGTH if is_cut else FinishReason.STOP) if is_last else None
    return Piece("", (), reason, 0, events=events)


def chat(steps):
    """Return the message that a stream's deltas make, and that of the whole answer."""
    blocks, text, thoughts, calls = AnswerBlocks(call_id, CHAT_WORDS), "", "", []
    for events in steps:
        for delta in blocks.add(piece(events)):
            shown = json.loads(f"{{{delta}}}")["delta"]
            text += shown.get("content", "")
            thoughts += shown.get("reasoning", "")
            for call in shown.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for call in calls:
        del call["index"]
    whole = json.loads(f"{{{chat_message(blocks)}}}")["message"]
    found = {"content": text, "reasoning": thoughts, "tool_calls": calls}
    return found, {name: whole.get(name) or type(value)() for name, value in found.items()}


def sent(text):
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")
    ]


def messages(steps, is_cut):
    """The same of Anthropic's messages: blocks, with the text of each input."""
    blocks, made = AnswerBlocks(call_id, MESSAGE_WORDS), []
    for at, events in enumerate(steps):
        for event in sent("".join(blocks.add(piece(events, at + 1 == len(steps), is_cut)))):
            if event["type"] == "content_block_start":
                assert event["index"] == len(made)
                made.append([event["content_block"], "", False])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "partial_json")
                made[event["index"]][1] += delta.get(kind, "")
            else:
                made[event["index"]][2] = True
    assert all(is_stopped for _, _, is_stopped in made)
    return made, content(blocks)


def responses(steps, is_cut):
    """The same of OpenAI's responses: what the events bring of each item, and the items."""
    items, made, deltas = OutputItems("r"), [], {}
    blocks = AnswerBlocks(call_id, items.words)
    for at, events in enumerate(steps):
        for event in sent("".join(blocks.add(piece(events, at + 1 == len(steps), is_cut)))):
            if event["type"] == "response.output_item.done":
                made.append(event["item"])
            elif event["type"] == "response.function_call_arguments.delta":
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    return made, items.done(blocks), deltas


def check_all_apis(steps, is_cut):
    found, whole = chat(steps)
    assert found == whole
    made, content = messages(steps, is_cut)
    cut = len(made) - len(content)
    assert cut <= is_cut
    for (begun, text, _), block in zip(made[: len(content)], content, strict=True):
        kind = begun["type"]
        shown = json.loads(text or "{}") if kind == "tool_use" else text
        assert block == {**begun, "input" if kind == "tool_use" else kind: shown}
    made, done, deltas = responses(steps, is_cut)
    assert made == done
    calls = {item["id"]: item["arguments"] for item in done if item["type"] == "function_call"}
    assert {name: text for name, text in calls.items() if text} == deltas
    assert [item["status"] for item in done if item["type"] == "function_call"].count("incomplete") == cut
    assert [item["status"] for item in done[:-1]].count("incomplete") == 0
    return whole


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer.family} {answer.text[:30]}")
def test_a_stream_brings_what_the_whole_answer_has_in_each_family(answer):
    whole = None
    for pieces in splits(answer.text):
        steps = pushed(FORMS[answer.family], pieces, is_thinking=answer.is_thinking)
        found = check_all_apis(steps, is_cut=False)
        assert found == (whole := whole or found)


@pytest.mark.parametrize("num_texts", [400, pytest.param(1_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", sorted(FORMS))
def test_a_stream_of_any_text_brings_what_the_whole_answer_has(family, num_texts):
    rng, answers = random.Random(family), [answer for answer in ANSWERS if answer.family == family]
    marks = [*FORMS[family].marks, *'{}"\\[]<a \n=:>(),é', *BETWEEN, "\\ud83d", "1e999", "\N{GRINNING FACE}"]
    num_calls = 0
    for _ in range(num_texts):
        parts = [rng.choice(marks) for _ in range(rng.randrange(12))]
        if answers:
            whole = rng.choice(answers).text
            at = rng.randrange(len(whole) + 1)
            parts = [whole[:at], *parts, whole[at:]] if rng.random() < 0.5 else [whole, *parts]
        text, is_cut, is_thinking = "".join(parts), rng.random() < 0.3, rng.random() < 0.3
        ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        pieces = [text[begin:end] for begin, end in pairwise([0, *ends, len(text)])]
        once, split = (
            check_all_apis(pushed(FORMS[family], each, is_cut, is_thinking), is_cut)
            for each in ([text], pieces)
        )
        assert once == split
        num_calls += len(once["tool_calls"])
    assert num_calls or not FORMS[family].calls


@pytest.mark.parametrize("text", TEXTS)
def test_demanded_calls_are_the_same_wherever_they_are_split(text):
    whole = None
    for pieces in splits(text):
        steps = pushed(DEMANDED, pieces)
        found = check_all_apis(steps, is_cut=False)
        assert found == (whole := whole or found)
    told = joined([event for events in pushed(DEMANDED, [text]) for event in events])
    calls = [event for event in told if isinstance(event, Called)]
    if text.startswith("[") and '"arguments": 5' not in text:
        wanted = [(call["name"], call["arguments"]) for call in json.loads(text)]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == wanted
    else:
        assert not calls


@pytest.mark.parametrize("text", TEXTS)
def test_what_was_sent_of_a_demanded_call_stays_wherever_it_is_cut_off(text):
    parser, sent_before, known = AnswerParser(DEMANDED, {}), [], ""
    for at, char in enumerate(text):
        sent_before += parser.push(char)
        steps = pushed(DEMANDED, [text[: at + 1]], is_cut=True)
        told = joined([event for events in steps for event in events])
        assert joined(sent_before) == told[: len(joined(sent_before))], (
            "the end of a cut answer takes nothing back"
        )
        check_all_apis(steps, is_cut=True)
        shown = "".join(event.text for event in sent_before if isinstance(event, Argued))
        assert shown.startswith(known)
        known = shown


def test_arguments_come_with_the_characters_that_they_are_made_of():
    text = '[{"name": "say", "arguments": {"text": "one two"}}]'
    arguments = '{"text": "one two"}'
    begin = text.index(arguments)
    steps = pushed(DEMANDED, list(text))
    assert steps[begin] == [Calling("say"), Argued("{")]
    for at in range(1, len(arguments) - 1):
        assert steps[begin + at] == [Argued(arguments[at])]
    assert steps[begin + len(arguments) - 1] == [Argued("}"), Called("say", arguments)]


def test_a_long_beginning_is_read_as_a_whole():
    text = '[{"name":' + " " * 3_000 + '"say", "arguments": {}}]'
    found = [
        joined([event for events in pushed(DEMANDED, pieces) for event in events])
        for pieces in splits(text[:9] + text[9:])
    ]
    assert all(each == [Called("say", "{}")] for each, _ in pairwise(found))


def test_what_is_no_call_is_text_unless_it_was_cut():
    text = '[{"name": 5, "arguments": {}}]'
    for pieces in splits(text):
        events = joined([event for step in pushed(DEMANDED, pieces) for event in step])
        assert events == [Said('{"name": 5, "arguments": {}}')]
        assert not joined([event for step in pushed(DEMANDED, pieces, is_cut=True) for event in step])
