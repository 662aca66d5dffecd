"""Calls whose arguments are JSON: the forms of Hermes and Qwen, Llama 3, Mistral, DeepSeek and Kimi.

The arguments end where their JSON ends, whatever marks stand in its texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from conductor.api.parsing.events import Called, Emit, Schemas, called_or_none, handed, value_or_none
from conductor.api.parsing.feed import Feed, JsonText, Marks, Steps

ARGUMENTS_KEYS = ("arguments", "parameters")


def _of_object(json: JsonText, others: object) -> Called | None:
    """Return the call that an object with a name and arguments is; `others`: arguments where it has none."""
    value = value_or_none(json.text) if json.is_whole else None
    if not isinstance(value, Mapping):
        return None
    given = next((value[key] for key in ARGUMENTS_KEYS if key in value), others)
    return called_or_none(value.get("name"), given)


def tagged_object(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read `{"name": ..., "arguments": ...}</tool_call>`; returns what is no call, None: it was one."""
    space = yield from feed.space()
    if not feed.text.startswith("{"):
        return (yield from feed.no_call(space, "</tool_call>"))
    json = yield from feed.json()
    call = _of_object(json, {})
    if call is None:
        return space + json.text
    emit(call)
    space = yield from feed.space()
    if not (yield from feed.begins("</tool_call>")):
        feed.text = space + feed.text
    return None


def bare_objects(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read the objects of Llama 3, which stand alone or between semicolons, to the first that is no call."""
    space = yield from feed.space()
    if not feed.text.startswith("{"):
        return space
    while True:
        json = yield from feed.json()
        call = _of_object(json, None)
        if call is None or (schemas and call.name not in schemas):
            return space + json.text
        emit(call)
        space = yield from feed.space()
        mark = yield from feed.begins(";", "<|python_tag|>")
        space = space + mark + (yield from feed.space())
        if not feed.text.startswith("{"):
            return space if space.strip() and feed.text else None


_MISTRAL_HEAD = Marks("[CALL_ID]", "[ARGS]", "{", "\n", "[TOOL_CALLS]")
_MISTRAL_ID = Marks("[ARGS]", "\n")


def mistral(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read what follows `[TOOL_CALLS]`: a list of objects, or a name, an id perhaps, and arguments."""
    space = yield from feed.space()
    if feed.text.startswith("["):
        json = yield from feed.json()
        values = value_or_none(json.text) if json.is_whole else None
        if not isinstance(values, list):
            return space + json.text
        calls = [
            called_or_none(value.get("name"), value.get("arguments", {}))
            for value in values
            if isinstance(value, dict)
        ]
        for call in calls:
            if call is not None:
                emit(call)
        return None if any(calls) else space + json.text
    name, found = yield from feed.text_until(_MISTRAL_HEAD)
    head = space + name
    if found in ("{", "[TOOL_CALLS]"):
        feed.text = found + feed.text
    else:
        head += found
    if found == "[CALL_ID]":
        call_id, found = yield from feed.text_until(_MISTRAL_ID)
        head += call_id + found
    if found == "[ARGS]":
        head += yield from feed.space()
    if found not in ("[ARGS]", "{") or not feed.text.startswith("{"):
        return head
    call, text = yield from feed.call(name.strip())
    return handed(call, emit, head + text)


DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_CALL_END, _DEEPSEEK_END = DEEPSEEK_MARKS
_DEEPSEEK_TO_SEP, _DEEPSEEK_TO_END = Marks(_DEEPSEEK_SEP), Marks(_DEEPSEEK_CALL_END)
_LINE_END = Marks("\n")


def deepseek(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read the calls of a section of DeepSeek V3, R1 (a name before fenced JSON) or V3.1 (a name, JSON)."""
    while True:
        space = yield from feed.space()
        mark = yield from feed.begins(_DEEPSEEK_CALL, _DEEPSEEK_END)
        if mark == _DEEPSEEK_END:
            return None
        if not mark:
            return (yield from feed.no_call(space, _DEEPSEEK_END))
        name, _ = yield from feed.text_until(_DEEPSEEK_TO_SEP)
        if name.strip() == "function" and not feed.text.startswith("{"):
            name, _ = yield from feed.text_until(_LINE_END)
            yield from feed.space()
            yield from feed.begins("```json")
        name = name.strip()
        yield from feed.space()
        call, text = yield from feed.call(name)
        if call is None:
            return f"{mark}{name}{_DEEPSEEK_SEP}{text}"
        emit(call)
        yield from feed.until(_DEEPSEEK_TO_END, lambda text: None)


_KIMI_CALL, _KIMI_ARGUMENT = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_KIMI_CALL_END, _KIMI_END = "<|tool_call_end|>", "<|tool_calls_section_end|>"
KIMI_MARKS = (_KIMI_CALL, _KIMI_ARGUMENT, _KIMI_CALL_END, _KIMI_END)
_KIMI_NEXT = Marks(_KIMI_CALL, _KIMI_END)
_KIMI_TO_ARGUMENT, _KIMI_TO_END = Marks(_KIMI_ARGUMENT), Marks(_KIMI_CALL_END)


def kimi(feed: Feed, schemas: Schemas, emit: Emit) -> Steps[str | None]:
    """Read the calls of a section of Kimi K2, whose ids hold the names: `functions.NAME:INDEX`."""
    while True:
        # What stands between calls is noise: the model was trained on nothing there.
        mark = yield from feed.until(_KIMI_NEXT, lambda text: None)
        if mark != _KIMI_CALL:
            return None
        head, _ = yield from feed.text_until(_KIMI_TO_ARGUMENT)
        call_id = head.strip()
        yield from feed.space()
        call, text = yield from feed.call(call_id.removeprefix("functions.").rpartition(":")[0] or call_id)
        if call is None:
            return f"{mark}{call_id}{_KIMI_ARGUMENT}{text}"
        emit(call)
        yield from feed.until(_KIMI_TO_END, lambda text: None)
