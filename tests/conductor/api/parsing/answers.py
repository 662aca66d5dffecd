# ruff: noqa: E501  (the text of an answer is not broken)
"""An answer of each family of models, and what is in it."""

import json
from typing import Any, NamedTuple

from conductor.api.parsing.answer import AnswerParser, joined
from conductor.api.parsing.events import Called, Event, Said, Thought
from conductor.api.parsing.families import FORMS

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}, "tags": {"type": "array"}}},
    "now": {"type": "object", "properties": {}},
}


class Answer(NamedTuple):
    family: str
    text: str
    events: list[Event]
    is_thinking: bool = False


def parsed(answer: Answer, pieces: list[str], is_cut: bool = False) -> list[Event]:
    parser = AnswerParser(FORMS[answer.family], SCHEMAS, answer.is_thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish(is_cut))


BETWEEN = [
    *("name", "add", '{"name":"now"}', '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<parameter=", "</parameter>", "</function>", "</tool_call>", "<tool_call|>", "<|end|><|start|>"),
    *("<|message|>", "to=f ", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[ARGS]"),
    *("<｜DSML｜invoke name=", "</｜DSML｜invoke>", "</｜DSML｜function_calls>", "<｜DSML｜parameter name="),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|open|>argument", "<|close|>call<|sep|>", "<|sep|>"),
]
"""Marks that stand within calls."""

ADD = Called("add", '{"a": 1, "b": 2.5}')
NOW = Called("now", "{}")


def say(text: str) -> Called:
    return Called("say", json.dumps({"text": text}, ensure_ascii=False))


CALL, END = "<tool_call>", "</tool_call>"
D = "｜DSML｜"

ANSWERS = [
    Answer(
        "hermes",
        "Plain <b>text</b> with a < and {braces}.\n",
        [Said("Plain <b>text</b> with a < and {braces}.\n")],
    ),
    Answer(
        "hermes",
        f"<think>\nLet me see.\n</think>\n\nNow.\n{CALL}\n"
        '{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n'
        f'{END}\n{CALL}\n{{"name": "say", "arguments": {{"text": "a {END} \\" {{"}}}}\n{END}',
        [Thought("Let me see."), Said("Now."), ADD, say(f'a {END} " {{')],
    ),
    Answer("hermes", f"{CALL}not JSON{END} after", [Said(f"{CALL}not JSON{END} after")]),
    Answer(
        "hermes",
        f'{CALL}{{"name": "add", "arguments": [1]}}{END}',
        [Said(f'{CALL}{{"name": "add", "arguments": [1]}}{END}')],
    ),
    Answer("hermes", f'{CALL}{{"name": "now"}}{END} done', [NOW, Said("done")]),
    Answer("hermes", "so</think>\n\nHi", [Thought("so"), Said("Hi")], is_thinking=True),
    Answer(
        "qwen-xml",
        f"Why.\n</think>\n\nSo:\n{CALL}\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n"
        f"</function>\n{END}\n{CALL}\n<function=say>\n<parameter=text>\nif </parameter> or {END}:\n  x\n\n</parameter>\n"
        f"</function>\n{END}",
        [Thought("Why."), Said("So:"), ADD, say(f"if </parameter> or {END}:\n  x\n")],
        is_thinking=True,
    ),
    Answer("qwen-xml", "<function=now>\n</function>", [NOW]),
    Answer("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2.5}}', [ADD]),
    Answer(
        "llama3",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        [NOW, NOW],
    ),
    Answer(
        "llama3",
        '{"name": "Ann", "parameters": {}} is a name',
        [Said('{"name": "Ann", "parameters": {}} is a name')],
    ),
    Answer("llama4", "[add(a=1, b=2.5), now()]<|python_end|>", [ADD, NOW]),
    Answer("llama4", "[link](http://a) and [1, 2]", [Said("[link](http://a) and [1, 2]")]),
    Answer("llama4", "[add(a=__import__('os'))]", [Said("[add(a=__import__('os'))]")]),
    Answer(
        "mistral",
        '[THINK]so [TOOL_CALLS][/THINK]Hi.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2.5}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
        [Thought("so [TOOL_CALLS]"), Said("Hi."), ADD, NOW],
    ),
    Answer(
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2.5}}, {"arguments": {}, "name": "now"}]',
        [ADD, NOW],
    ),
    Answer("mistral-think-text", "<think>r</think>c", [Thought("r"), Said("c")]),
    Answer(
        "deepseek-v3",
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": 2.5}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Said("Yes."), ADD, NOW],
    ),
    *(
        Answer(
            family,
            f'Plan.</think>\n\n<{D}{section}>\n<{D}{space}invoke name="add">\n<{D}{space}parameter name="a" string="false">1'
            f'</{D}{space}parameter>\n<{D}{space}parameter name="b" string="false">2.5</{D}{space}parameter>\n</{D}{space}invoke>\n'
            f'<{D}{space}invoke name="say">\n<{D}{space}parameter name="text" string="true">1 <{D}{space}invoke name="x"></{D}{space}parameter>'
            f'\n</{D}{space}invoke>\n<{D}{space}invoke name="now"/>\n</{D}{section}>',
            [Thought("Plan."), ADD, say(f'1 <{D}{space}invoke name="x">'), NOW],
            is_thinking=True,
        )
        for family, section, space in (
            ("deepseek-v3.2", "function_calls", ""),
            ("deepseek-v4", "tool_calls", ""),
            ("deepseek-v4.1", " calls", " "),
        )
    ),
    Answer(
        "gemma",
        '<|channel>thought\nHm.\n<channel|>So.<|tool_call>call:add{a:1,b:2.5}<tool_call|><|tool_call>call:say{text:<|"|>a <tool_call|> } b<|"|>}<tool_call|>',
        [Thought("Hm."), Said("So."), ADD, say("a <tool_call|> } b")],
    ),
    Answer(
        "gemma", "<|tool_call>call:add{a:[}<tool_call|>.", [Said("<|tool_call>call:add{a:[}<tool_call|>.")]
    ),
    Answer(
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm, <|call|> is a mark.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1, "b": 2.5}<|call|>'
        '<|start|>assistant<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text": "<|end|>"}',
        [Thought("Hm, <|call|> is a mark."), Said("So."), ADD, say("<|end|>")],
    ),
    Answer("gpt-oss", "<|channel|>final<|message|>Hi.<|return|>", [Said("Hi.")]),
    Answer("gpt-oss", "no header at all", [Said("no header at all")]),
    Answer(
        "glm",
        f"<think>Hm.</think>\nSo.{CALL}add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>2.5</arg_value>\n{END}"
        f"{CALL}say<arg_key>text</arg_key><arg_value> a {END} b </arg_value>{END}{CALL}now{END}",
        [Thought("Hm."), Said("So."), ADD, say(f" a {END} b "), NOW],
    ),
    Answer(
        "kimi-k2",
        "Hm.</think>So. <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": 2.5}<|tool_call_end|> noise <|tool_call_begin|>functions.say:1<|tool_call_argument_begin|>'
        '{"text": "<|tool_call_end|>"}<|tool_call_end|><|tool_calls_section_end|>',
        [Thought("Hm."), Said("So. "), ADD, say("<|tool_call_end|>")],
        is_thinking=True,
    ),
    Answer(
        "kimi-k3",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="number"<|sep|>2.5<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        [Thought("Hm."), Said("So."), ADD, NOW],
        is_thinking=True,
    ),
]
