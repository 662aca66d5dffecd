"""Calls that a client demands: a list of objects that a grammar holds the model to, whatever its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conductor.api.parsing.answer import Form
from conductor.api.parsing.events import Emit, Said, Schemas, called_or_none, value_or_none
from conductor.api.parsing.feed import Feed, Steps

MAX_DEMANDED_CALLS = 8
MAX_REF_DEPTH = 200


def demanded_schema(schemas: Mapping[str, Mapping[str, Any]], is_parallel: bool) -> str:
    """Return the JSON schema of a list of calls of these tools, of which one at least is wanted."""
    items = []
    definitions = {}
    for index, (name, schema) in enumerate(schemas.items()):
        key = f"tool{index}"
        definitions[key] = _moved(dict(schema) or {"type": "object"}, f"#/$defs/{key}", 0)
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


def _read(feed: Feed, schemas: Schemas, emit: Emit, is_thinking: bool) -> Steps[None]:
    yield from feed.space()
    yield from feed.begins("[")
    while True:
        yield from feed.space()
        yield from feed.begins(",")
        yield from feed.space()
        if not feed.text.startswith("{"):
            return
        json_text = yield from feed.json()
        value = value_or_none(json_text.text) if json_text.is_whole else None
        call = called_or_none(value.get("name"), value.get("arguments")) if isinstance(value, dict) else None
        if call is None:
            if not feed.is_cut:
                emit(Said(json_text.text))
            return
        emit(call)


DEMANDED = Form({}, run=_read)
"""The form of demanded calls."""
