"""Values that a model writes as plain text, made what the tool's schema says they are.

Families that write each argument between tags leave out the quotes that part a text from a number. The schema
says which is meant; where it says nothing, JSON is JSON and all else is text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from conductor.api.parsing.events import MAX_CALL_DEPTH, characters, value_or_none

Value = TypeVar("Value")

_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_ALL = frozenset({*_KINDS, "null", "string"})
_MAX_UNIONS = 8
"""Schemas in each other by anyOf and its like that are looked at."""
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = {"null", "None"}


def typed(text: str, schema: object) -> Any:
    """Return the value of an argument that a model wrote as `text`."""
    kinds = _kinds(schema, 0) or _ALL
    if kinds == {"string"}:
        return text
    plain = text.strip()
    if "null" in kinds and plain in _NULLS:
        return None
    if "boolean" in kinds and plain in _WORDS:
        return _WORDS[plain]
    value = value_or_none(plain)
    if _is_of(value, kinds):
        return value
    value = literal_or_none(plain)
    return value if _is_of(value, kinds) and isinstance(value, list | dict) else text


def literal_or_none(text: str) -> Any:
    """Return the value of a Python literal: some models write lists and tables so. None where it is none."""
    return _read(text, _plain)


def pythonic_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a list such as `[get_weather(city='LA')]`; none where `text` is no such list."""
    return _read(text.strip(), _calls) or []


def _read(text: str, read: Callable[[ast.expr], Value]) -> Value | None:
    """Return what `read` makes of a Python expression; None where it raises ValueError, or there is none."""
    if _depth(text) > MAX_CALL_DEPTH:
        return None
    try:
        return read(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _calls(node: ast.expr) -> list[tuple[str, dict[str, Any]]]:
    return [_call(item) for item in node.elts] if isinstance(node, ast.List) else []


def _call(item: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("no call by names")
    arguments = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise ValueError("no name")
        arguments[keyword.arg] = _plain(keyword.value)
    return ast.unparse(item.func), arguments


def _plain(node: ast.expr) -> Any:
    """Return the value of a literal that JSON can say; raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=str() as text):
            return characters(text)
        case ast.Constant(value=int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return _WORDS.get(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List() | ast.Tuple():
            return [_plain(item) for item in node.elts]
        case ast.Dict():
            return {_key(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return characters(node.value)
    raise ValueError("no text for a key")


def _depth(text: str) -> int:
    """Return how deep brackets are in each other, at least: those in texts count too."""
    depth = deepest = 0
    for mark in re.findall(r"[\[\](){}]", text):
        depth += 1 if mark in "[({" else -1
        deepest = max(deepest, depth)
    return deepest


def _is_of(value: object, kinds: frozenset[str]) -> bool:
    # True is an int to Python.
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, str):
        return False  # in quotes of its own: text as it stands
    return any(isinstance(value, _KINDS[kind]) for kind in kinds & _KINDS.keys())


def _kinds(schema: object, depth: int) -> frozenset[str]:
    """Return the types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_UNIONS:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & _ALL
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str)) & _ALL
    found: set[str] = set()
    for union in ("anyOf", "oneOf", "allOf"):
        members = schema.get(union)
        for member in members if isinstance(members, list) else ():
            found |= _kinds(member, depth + 1)
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        found.add("string")
    return frozenset(found)
