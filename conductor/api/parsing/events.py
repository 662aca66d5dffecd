"""The parts of an answer: reasoning, text for the reader, and calls of tools."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

MAX_CALL_DEPTH = 100
"""Lists and objects in each other in a tool's schema, or a call's arguments: what is deeper is no call but
text."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one surrogate, which may stand alone in JSON, and is no character then."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool that was offered, by the tool's name."""


class Said(NamedTuple):
    """A part of the answer's text."""

    text: str


class Thought(NamedTuple):
    """A part of the reasoning that goes before the answer."""

    text: str


class Calling(NamedTuple):
    """The beginning of a call whose arguments come in parts; `Called` ends it.

    Where the answer ends before, its limit of tokens has cut the call off.
    """

    name: str


class Argued(NamedTuple):
    """A part of the arguments of the call that has begun."""

    text: str


class Called(NamedTuple):
    """A whole call of a tool: the one that has begun, or one of which nothing came before."""

    name: str
    arguments: str
    """JSON of an object."""


Event = Said | Thought | Calling | Argued | Called
Emit = Callable[[Event], None]


def called_or_none(name: object, arguments: object) -> Called | None:
    """Return a call, or None for what is none: its name is no text, or its arguments are no object."""
    if isinstance(arguments, str):
        arguments = value_or_none(arguments)  # some models write the object as a text
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or fault_of(arguments):
        return None
    try:
        return Called(name, json.dumps(arguments, ensure_ascii=False))
    except ValueError:  # a number of thousands of digits
        return None


def handed(call: Called | None, emit: Emit, text: str) -> str | None:
    """Hand a call to `emit` and return None; return `text`, which was to be one, where it is none."""
    if call is None:
        return text
    emit(call)
    return None


def fault_of(value: Any) -> str:
    """Return what a value of JSON has that it may not have, in words; empty: nothing.

    A level at a time, by functions of C: there may be a hundred thousand values."""
    level = [value]
    for depth in range(MAX_CALL_DEPTH + 1):
        if not all(map(math.isfinite, filter(float.__instancecheck__, level))):
            return "it has a number that JSON cannot say"
        objects = [*filter(dict.__instancecheck__, level)]
        lists = [*filter(list.__instancecheck__, level)]
        if not objects and not lists:
            return ""
        if depth < MAX_CALL_DEPTH:
            level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)]
    return f"at most {MAX_CALL_DEPTH} levels"


def value_or_none(text: str) -> Any:
    """Return the value of a JSON text; None where it is malformed, beyond bounds, or null.

    What neither texts nor JSON can hold is exchanged: half of a pair of surrogates for U+FFFD, and a number
    beyond all floats for the greatest.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_no_constant, strict=False)
        return with_texts(value, characters) if _HALF_PAIR.search(text) else value
    except (ValueError, RecursionError):
        return None


def characters(text: str) -> str:
    """Return `text` with U+FFFD for each half of a pair of surrogates."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_texts(value: Any, changed: Callable[[str], str]) -> Any:
    """Return a value of JSON with each of its texts changed, the names of members too."""
    match value:
        case str():
            return changed(value)
        case Mapping():
            return {changed(key): with_texts(item, changed) for key, item in value.items()}
        case list():
            return [with_texts(item, changed) for item in value]
        case _:
            return value


def _finite(digits: str) -> float:
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
