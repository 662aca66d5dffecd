"""Calls that a client demands: a list of objects that a grammar holds the model to, whatever its family.

Their arguments are handed on as they come, in the very text that the model writes. No later token can make
them anything else; only the limit of tokens can end them early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from conductor.api.parsing.answer import Form
from conductor.api.parsing.events import (
    Argued,
    Called,
    Calling,
    Emit,
    Said,
    Schemas,
    called_or_none,
    value_or_none,
)
from conductor.api.parsing.feed import Feed, Steps

MAX_DEMANDED_CALLS = 8
MAX_REF_DEPTH = 200

_COMPOSING = frozenset(
    {"allOf", "not", "if", "then", "else", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
    | {"dependencies", "dependentSchemas", "dependentRequired"}
)
_BESIDE = frozenset(["anyOf", "oneOf", "$ref"])
"""Keywords that say more of an object whose properties are named beside them."""
_SAYING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "minProperties"])
"""Keywords by which a schema says itself what other properties there may be."""
_VALUES = frozenset(["enum", "const", "default", "examples"])
_MAPS = frozenset(["properties", "$defs", "definitions"])


def demanded_schema(schemas: Mapping[str, Mapping[str, Any]], is_parallel: bool) -> str:
    """Return the JSON schema of a list of calls of these tools, of which one at least is wanted."""
    items = []
    definitions = {}
    for index, (name, schema) in enumerate(schemas.items()):
        key = f"tool{index}"
        definitions[key] = _moved(closed(schema) or {"type": "object"}, f"#/$defs/{key}", 0)
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = MAX_DEMANDED_CALLS if is_parallel else 1
    return json.dumps(
        {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": items}, "$defs": definitions},
        ensure_ascii=False,
    )


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool's schema without arguments that it does not name, unless it says that there may be more.

    JSON Schema allows any others, and a small model goes on with them to its limit. A schema that is put
    together of several stays as it is: what one part does not name, another may.
    """
    return dict(schema) if _is_composed(schema, 0) else _closed(schema, 0)


def _is_composed(value: Any, depth: int) -> bool:
    if depth > MAX_REF_DEPTH:
        return True
    if isinstance(value, list):
        return any(_is_composed(item, depth + 1) for item in value)
    if not isinstance(value, Mapping):
        return False
    if not _COMPOSING.isdisjoint(value) or ("properties" in value and not _BESIDE.isdisjoint(value)):
        return True
    return any(_is_composed(item, depth + 1) for key, item in value.items() if key not in _VALUES)


def _closed(schema: Any, depth: int) -> Any:
    if isinstance(schema, list):
        return [_closed(item, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: {name: _closed(item, depth + 1) for name, item in value.items()}
        if key in _MAPS and isinstance(value, Mapping)
        else value
        if key in _VALUES
        else _closed(value, depth + 1)
        for key, value in schema.items()
    }
    named = found.get("properties")
    wanted = found.get("required", [])
    if (
        isinstance(named, Mapping)
        and named
        and _SAYING.isdisjoint(found)
        and isinstance(wanted, list)
        and all(isinstance(name, str) and name in named for name in wanted)
    ):
        found["additionalProperties"] = False
    return found


def _moved(value: Any, to: str, depth: int) -> Any:
    """Return a schema whose references to its own root hold where it stands at `to`."""
    if depth > MAX_REF_DEPTH:
        return value
    if isinstance(value, list):
        return [_moved(item, to, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item, to, depth + 1) for key, item in value.items()}
    ref = value.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = to + ref[1:]
    return moved


_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
"""The beginning of a call, as the grammar has it: what follows are the arguments."""
_MAX_HEAD_CHARS = 2_048


def _read(feed: Feed, schemas: Schemas, emit: Emit, is_thinking: bool) -> Steps[None]:
    yield from feed.space()
    yield from feed.begins("[")
    while True:
        yield from feed.space()
        yield from feed.begins(",")
        yield from feed.space()
        if not feed.text.startswith("{"):
            return
        head = yield from feed.head(_HEAD, _MAX_HEAD_CHARS)
        is_whole = yield from (_whole(feed, emit) if head is None else _growing(head, feed, emit))
        if not is_whole:
            return


def _growing(head: re.Match[str], feed: Feed, emit: Emit) -> Steps[bool]:
    """Read the arguments of a call, and hand them on as they come; returns whether it is whole."""
    name = value_or_none(head[1])
    if not isinstance(name, str):
        return False
    emit(Calling(name))
    arguments = yield from feed.json(lambda text: emit(Argued(text)))
    if not arguments.is_whole or not isinstance(value_or_none(arguments.text), dict):
        return False
    emit(Called(name, arguments.text))
    yield from feed.space()
    return bool((yield from feed.begins("}")))


def _whole(feed: Feed, emit: Emit) -> Steps[bool]:
    """Read a call of another form, which is handed on when it is whole; returns whether it is."""
    json_text = yield from feed.json()
    value = value_or_none(json_text.text) if json_text.is_whole else None
    call = called_or_none(value.get("name"), value.get("arguments")) if isinstance(value, dict) else None
    if call is not None:
        emit(call)
    elif not feed.is_cut:
        emit(Said(json_text.text))
    return call is not None


DEMANDED = Form({}, run=_read)
"""The form of demanded calls."""
