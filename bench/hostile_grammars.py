"""Forms of answers made to harm whoever compiles them: deep, long, explosive, endless, or no grammars.

Each has the status that it is documented to have. A grammar that is refused is refused by the conductor, and
no node hears of it; of one that is taken, nodes can compile it because a process with less has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from base.request import MAX_GRAMMAR_CHARS
from bench.hostile_bodies import SERVED_MODEL, Body

CHATS = "/v1/chat/completions"


class HostileForm(NamedTuple):
    """A form of an answer, by the fields of a body that ask for it."""

    name: str
    fields: dict[str, Any]
    status: int = 400

    def body(self, model: str = SERVED_MODEL) -> bytes:
        chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        return json.dumps(chat | self.fields).encode()


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _chain(length: int) -> dict[str, Any]:
    """Return a schema of references, each to the next."""
    rules: dict[str, Any] = {
        f"a{at}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}, "required": ["x"]}
        for at in range(length)
    }
    return {"$defs": {**rules, f"a{length}": {}}, "$ref": "#/$defs/a0"}


def _rules(length: int) -> str:
    """Return a grammar of rules, each twice the next."""
    lines = [f"r{at}: r{at + 1} r{at + 1}" for at in range(length)]
    return "\n".join(["start: r0", *lines, f'r{length}: "a"'])


def hostile_grammars() -> list[HostileForm]:
    """Return them all."""
    return [HostileForm(*row) for row in (*_schemas(), *_others())]


Row = tuple[str, dict[str, Any], int]


def _schemas() -> Iterator[Row]:
    branches = [{"type": "object", "properties": {f"a{at}": {"const": at}}} for at in range(40)]
    ways = [[{"properties": {f"a{at}": {"const": way}}} for way in range(4)] for at in range(12)]
    rows: dict[str, tuple[Any, int]] = {
        "schema of depth 90": (_nested(90), 200),
        "schema of depth 5,000, as text": ('{"items":' * 5_000 + "{}" + "}" * 5_000, 400),
        "references of depth 1,000": (_chain(1_000), 400),
        "a reference to itself": ({"$ref": "#"}, 400),
        "schema of 10 MB": ({"enum": ["a" * 1_000] * 7_000}, 400),
        "20,000 properties": ({"properties": {f"p{at}": {} for at in range(20_000)}}, 400),
        "products of alternatives": ({"allOf": [{"anyOf": way} for way in ways]}, 400),
        "one of forty that overlap": ({"oneOf": branches}, 400),
        "a multiple of a great prime": ({"type": "integer", "multipleOf": 982_451_653}, 400),
        "a multiple of next to nothing": ({"type": "number", "multipleOf": 1e-300}, 400),
        "a billion items": ({"minItems": 10**9, "items": {"minItems": 10**9}}, 200),
        "a text of a billion characters": ({"type": "string", "minLength": 10**9}, 200),
        "more items than there may be": ({"type": "array", "minItems": 5, "maxItems": 1}, 400),
        "a pattern of patterns": ({"type": "string", "pattern": "^(([a-z]+)+)+$"}, 200),
        "options of the library": ({"x-guidance": {"lenient": True}, "not": {}}, 400),
    }
    for name, (schema, status) in rows.items():
        yield name, {"guided_json": schema}, status


def _others() -> Iterator[Row]:
    half = MAX_GRAMMAR_CHARS // 2 - 10
    regexes = {
        "a regex of parentheses": ("(" * half + "a" + ")" * half, 400),
        "a regex of a billion steps": ("((a{1,1000}){1,1000}){1,1000}", 400),
        "a regex of a hundred million characters": ("a{100000000}", 400),
        "a regex that looks back a thousand": ("(a|b)*a(a|b){1000}", 200),
    }
    grammars = {
        "a grammar of parentheses": ("start: " + "(" * half + '"a"' + ")" * half, 400),
        "rules of depth 5,000": (_rules(5_000), 400),
        "a rule of itself": ('start: start start | "a" | ""', 200),
        "an intersection of many": ("start: A\nA: /(.*a.*){400}/ & /(.*b.*){400}/ & ~/(.*c.*){400}/", 400),
        "no grammar": ("\0" * 1_000, 400),
    }
    for name, (source, status) in regexes.items():
        yield name, {"guided_regex": source}, status
    for name, (source, status) in grammars.items():
        yield name, {"guided_grammar": source}, status
    yield "4,096 choices of no difference", {"guided_choice": ["a" * 20] * 4_096}, 400
    yield "two forms", {"guided_regex": "a", "guided_json": {}}, 400


def grammar_bodies() -> Iterator[Body]:
    """Yield the bodies that ask for them."""
    for item in hostile_grammars():
        yield Body(CHATS, f"grammar, {item.name}", lambda item=item: item.body())  # type: ignore[misc]
