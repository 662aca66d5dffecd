"""Conversations made to harm: each part of a turn as long as a body may be, in each API that has turns.

The walk of the schemas fills one field at a time, and so never sends a call with its result, or a last turn
of the assistant's. Here are those: calls, results, reasoning, the beginning of an answer, tools, variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.hostile_bodies import FILLINGS, HOLE, SERVED_MODEL, Body, Filling, Site, filled

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LIMIT = 8 << 20
ARGUMENT_BYTES = 1 << 19
"""Bytes of JSON within a text: half of what a conversation may have of it, because it is escaped."""
TEXTS = (
    *("text", "text of one word", "text of spaces", "text of faces", "text of special tokens"),
    *("text of quotes", "text of marks", "text of NULs"),
)
ARGUMENTS = (
    "maps in maps",
    "keys of lists",
    "list of []",
    "list of long numbers",
    "text of pairs",
    "one number",
)
HALF_PAIRS = Filling("half pairs", lambda size: b'"' + b"\\ud83d" * (size // 6) + b'"')
ASKED = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"description": HOLE}}}


def hostile_turns() -> Iterator[Body]:
    """Yield them: each place of each API, with each text, and arguments of JSON that costs much."""
    for path, name, table, is_json in _places():
        for filling in FILLINGS:
            if filling.name in (ARGUMENTS if is_json else TEXTS):
                yield _body(path, name, table, filling, is_json)
        if is_json:
            yield _body(path, name, table, HALF_PAIRS, is_json)


def _body(path: str, name: str, table: dict[str, Any], filling: Filling, is_json: bool) -> Body:
    before, _, after = json.dumps({"model": SERVED_MODEL, **table}).partition(json.dumps(HOLE))
    site = Site(path, name, "one", before.encode(), after.encode(), None)

    def make() -> bytes:
        if not is_json:
            return filled(site, filling, LIMIT)
        text = f'{{"a":{filling.make(ARGUMENT_BYTES).decode()}}}'
        return site.before + json.dumps(text).encode() + site.after

    return Body(path, f"turn, {name}: {filling.name}", make)


_Places = Iterator[tuple[str, str, dict[str, Any], bool]]
"""A path, the name of a place, a body with `HOLE` there, and whether it is JSON within a text."""


def _places() -> _Places:
    yield from _chat_places()
    yield from _response_places()
    yield from _message_places()


def _chat_places() -> _Places:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": HOLE}}
    calling = {"role": "assistant", "tool_calls": [called]}
    plain = {"role": "assistant", "tool_calls": [called | {"function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": HOLE}
    reasoned = {"role": "assistant", "content": "a", "reasoning_content": HOLE}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
    bodies: dict[str, dict[str, Any]] = {
        "arguments of a call": {"messages": [ASKED, calling]},
        "result of a call": {"messages": [ASKED, plain, result]},
        "reasoning": {"messages": [ASKED, reasoned, ASKED]},
        "answer": {"messages": [ASKED, {"role": "assistant", "content": HOLE}, ASKED]},
        "tool": tools,
        "demanded tool": {**tools, "tool_choice": "required"},
        "variables": {"chat_template_kwargs": {"x": HOLE}},
    }
    for name, body in bodies.items():
        yield CHAT, name, {"messages": [ASKED], "max_tokens": 4, **body}, name == "arguments of a call"


def _response_places() -> _Places:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": HOLE}
    output = {"type": "function_call_output", "call_id": "c", "output": HOLE}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": HOLE}]}
    tools = {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    bodies: dict[str, dict[str, Any]] = {
        "arguments of a call": {"input": [ASKED, call]},
        "result of a call": {"input": [{**call, "arguments": "{}"}, output]},
        "reasoning": {"input": [thought, ASKED]},
        "answer": {"input": [{"role": "assistant", "content": HOLE}, ASKED]},
        "tool": tools,
        "demanded tool": {**tools, "tool_choice": "required"},
        "variables": {"chat_template_kwargs": {"x": HOLE}},
        "instructions": {"instructions": HOLE},
    }
    for name, body in bodies.items():
        yield (
            RESPONSES,
            name,
            {"input": [ASKED], "max_output_tokens": 4, **body},
            name == "arguments of a call",
        )


def _message_places() -> _Places:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": HOLE}
    thought = {"type": "thinking", "thinking": HOLE}
    tools = {"tools": [{"name": "f", "input_schema": SCHEMA}]}

    def said(block: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [block]}

    bodies: dict[str, dict[str, Any]] = {
        "input of a call": {"messages": [ASKED, said({**use, "input": {"a": HOLE}})]},
        "result of a call": {"messages": [said(use), {"role": "user", "content": [result]}]},
        "reasoning": {"messages": [ASKED, said(thought), ASKED]},
        "beginning of the answer": {"messages": [ASKED, {"role": "assistant", "content": HOLE}]},
        "tool": tools,
        "demanded tool": {**tools, "tool_choice": {"type": "any"}},
        "variables": {"chat_template_kwargs": {"x": HOLE}},
        "system": {"system": HOLE},
    }
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        for name, body in bodies.items():
            yield path, name, {"messages": [ASKED], "max_tokens": 4, **body}, False
