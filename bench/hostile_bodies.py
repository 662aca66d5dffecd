"""Bodies made to harm whoever reads them, generated from what the HTTP surface may be sent.

    schema of a body -> sites: every field, list, map and unknown field, nested ones too
    site x filling   -> bodies: the site full of the smallest of something, up to the limit

Nothing here is a list of known weaknesses: a field that is added is walked by the next run. The fillings are
those that cost a reader more than their bytes: values, lists in lists, keys, long numbers, wide texts,
escapes. Each is made twice: as long as a body may be, and with as many parts as
`conductor/api/body_bounds.py` lets by. `tests/conductor/test_hostile_bodies.py` walks the same sites.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from conductor.api.body_bounds import MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES
from conductor.api.routes import ROUTES

SERVED_MODEL = "smollm2"
HOLE = "\N{OBJECT REPLACEMENT CHARACTER}hole"
SPARE_PARTS = 40
"""Of the bounds on parts, for the body around a filling."""
MAX_NESTING = 4
"""Lists within each other that are walked."""
NUMBER_DIGITS = 4_300
"""Of the longest numbers that JSON's readers here take for integers."""


class Site(NamedTuple):
    """A place in the body of a route that may be filled."""

    path: str
    name: str
    """As errors name it: messages[0].content; `?` is a field that nobody knows."""
    kind: str
    """list, map, any or one: what its schema takes there."""
    before: bytes
    after: bytes
    bound: int | None
    """Of elements, by the schema; None: it has no bound of its own."""
    element: bytes = b""
    """JSON of the smallest that a list takes."""


class Body(NamedTuple):
    """What is sent where."""

    path: str
    name: str
    make: Callable[[], bytes]
    is_stream: bool = False

    @property
    def is_message(self) -> bool:
        """Whether gRPC carries it."""
        return self.path.startswith(("/conductor.", "/grpc.", "/inference."))


class Filling(NamedTuple):
    """What a site is filled with."""

    name: str
    make: Callable[[int], bytes]
    """Returns about so many bytes of JSON."""


def http_sites() -> Iterator[Site]:
    """Yield every place of every body that HTTP clients may send."""
    for route in ROUTES:
        if route.body is not None:
            schema = route.body.model_json_schema()
            yield from _Walk(route.path, schema.get("$defs", {})).within(schema, "", lambda value: value)


class _Walk:
    def __init__(self, path: str, definitions: dict[str, Any]) -> None:
        self._path = path
        self._definitions = definitions

    def within(self, schema: dict[str, Any], name: str, wrap: Callable[[Any], Any]) -> Iterator[Site]:
        """Yield the sites of an object's fields; `wrap` puts a value of it into a body."""
        properties = schema["properties"]
        least = self._least(schema)
        for field, inner in properties.items():
            beside = {key: value for key, value in least.items() if key != field}
            if {field, "prompt"} <= properties.keys() - {"messages"} and "prompt" not in least:
                beside["prompt"] = "a"
            yield from self._at(inner, f"{name}.{field}".lstrip("."), _field(wrap, beside, field))
        yield self._site(f"{name}.?".lstrip("."), "any", _field(wrap, least, "x"), {}, b"1")

    def _at(self, schema: dict[str, Any], name: str, wrap: Callable[[Any], Any]) -> Iterator[Site]:
        forms = list(self._forms(schema))
        lists = [form for form in forms if form.get("type") == "array"]
        maps = [form for form in forms if form.get("type") == "object" and "properties" not in form]
        kind = "list" if lists else "map" if maps else "one"
        element = json.dumps(self._example(lists[0]["items"])).encode() if lists else b"1"
        yield self._site(name, kind, wrap, (lists or maps or [{}])[0], element)
        if name.count("[0]") == MAX_NESTING:
            return  # parts of contents may hold parts again
        for form in lists:
            yield from self._at(form["items"], f"{name}[0]", _element(wrap))
        for form in forms:
            if "properties" in form:
                yield from self.within(form, name, wrap)

    def _site(
        self, name: str, kind: str, wrap: Callable[[Any], Any], form: dict[str, Any], element: bytes
    ) -> Site:
        before, _, after = json.dumps(wrap(HOLE)).encode().partition(json.dumps(HOLE).encode())
        bound = form.get("maxItems", form.get("maxProperties"))
        return Site(self._path, name, kind, before, after, bound, element)

    def _forms(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what a value may be, references and alternatives resolved."""
        if "$ref" in schema:
            yield from self._forms(self._definitions[schema["$ref"].rpartition("/")[2]])
            return
        alternatives = schema.get("anyOf", schema.get("oneOf"))
        if alternatives is None:
            yield schema
        else:
            for each in alternatives:
                yield from self._forms(each)

    def _least(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the smallest object that is taken."""
        texts = {"text": "a"} if "text" in schema["properties"] else {}
        said = {"content": "a"} if "content" in schema["properties"] else {}
        short = {"max_tokens": 1} if "max_tokens" in schema["properties"] else {}
        needed = {field: self._example(schema["properties"][field]) for field in schema.get("required", ())}
        served = {"model": SERVED_MODEL} if "model" in schema["properties"] else {}
        return needed | served | (texts or said) | short

    def _example(self, schema: dict[str, Any]) -> Any:
        form = next(iter(self._forms(schema)))
        if "properties" in form:
            return self._least(form)
        if "enum" in form:
            return form["enum"][0]
        match form.get("type"):
            case "array":
                return [self._example(form["items"])]
            case "string":
                return "text"
            case _:
                return 1


def _field(wrap: Callable[[Any], Any], beside: dict[str, Any], field: str) -> Callable[[Any], Any]:
    return lambda value: wrap({**beside, field: value})


def _element(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: wrap([value])


def repeated(element: bytes, ends: bytes = b"[]") -> Callable[[int], bytes]:
    """Return what makes a list of one element."""

    def make(size: int) -> bytes:
        count = max(1, (size - 1) // (len(element) + 1))
        return ends[:1] + (element + b",") * (count - 1) + element + ends[1:]

    return make


def _text(unit: bytes, first: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: b'"' + first + unit * max(1, (size - 2 - len(first)) // len(unit)) + b'"'


def _nested(opening: bytes, closing: bytes) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        depth = (size - 1) // (len(opening) + len(closing))
        return opening * depth + b"1" + closing * depth

    return make


def _keys(value: bytes) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        count = max(1, (size - 2) // (10 + len(value)))
        return b"{" + b",".join(b'"%06x":%b' % (number, value) for number in range(count)) + b"}"

    return make


ELEMENTS = (
    *(
        b"1",
        b"[]",
        b"{}",
        b'""',
        b"null",
        b"[1]",
        b"true",
        b"1.5",
        b'"a"',
        b'{"a":1}',
        b"[[]]",
        b"[null,null]",
    ),
    *(b"123456789012345678901", '"\N{GRINNING FACE}"'.encode(), b'"\\u00e9"', b"-1"),
)
FILLINGS = (
    *(Filling(f"list of {element.decode()}", repeated(element)) for element in ELEMENTS),
    Filling("list of long numbers", repeated(b"7" * NUMBER_DIGITS)),
    Filling("list of fractions", repeated(b"1." + b"7" * 800)),
    Filling("one number", lambda size: b"7" * size),
    Filling("one fraction", lambda size: b"0." + b"7" * (size - 2)),
    Filling("one power", lambda size: b"1e" + b"7" * (size - 2)),
    Filling("lists in lists", _nested(b"[", b"]")),
    Filling("maps in maps", _nested(b'{"a":', b"}")),
    Filling("keys", _keys(b"1")),
    Filling("keys of lists", _keys(b"[]")),
    Filling("keys of texts", _keys(b'"a"')),
    Filling("one key again and again", repeated(b'"a":1', b"{}")),
    Filling("one long key", lambda size: b'{"' + b"a" * (size - 6) + b'":1}'),
    Filling("text", _text(b"a ")),
    Filling("text of one word", _text(b"a")),
    Filling("text of spaces", _text(b" ")),
    Filling("wide text", _text(b"a ", "\N{GRINNING FACE}".encode())),
    Filling("text of faces", _text("\N{GRINNING FACE}".encode())),
    Filling("text of escapes", _text(b"\\u00e9")),
    Filling("text of pairs", _text(b"\\ud83d\\ude00")),
    Filling("text of quotes", _text(b'\\"')),
    Filling("text of strokes", _text(b"\\\\")),
    Filling("text of marks", _text(b"[{,:")),
    Filling("text of special tokens", _text(b"<|im_start|>")),
    Filling("text of NULs", _text(b"\\u0000")),
    Filling("text of bytes that are no text", _text(b"\xff")),
    Filling("spaces", lambda size: b" " * (size - 1) + b"1"),
    Filling("noise of brackets", lambda size: b"[{" * (size // 2)),
    Filling("quotes", lambda size: b'"' * size),
    Filling("commas", lambda size: b"," * size),
)
SCALARS = ("list of 1", "list of {}", "one number", "one fraction", "keys", "wide text", "text of escapes")
"""The fillings of a field that takes neither list nor map: it is refused, or is a text."""


def fillings_of(site: Site) -> list[Filling]:
    """Return what to fill `site` with."""
    if site.kind == "one":
        return [filling for filling in FILLINGS if filling.name in SCALARS]
    return [*FILLINGS, Filling("list of its elements", repeated(site.element))]


def filled(site: Site, filling: Filling, size: int) -> bytes:
    """Return a body of at most `size` bytes."""
    return site.before + filling.make(size - len(site.before) - len(site.after)) + site.after


def let_by(filling: Filling, limit: int) -> int | None:
    """Return how many bytes of a filling have as many parts as a body may; None: it has few at any length."""
    sample = filling.make(10_000)
    counts = (
        (sample.count(b","), MAX_VALUES),
        (sample.count(b":"), MAX_MEMBERS),
        (sample.count(b"[") + sample.count(b"{"), MAX_CONTAINERS),
    )
    share = max((count / bound for count, bound in counts if count > 1), default=0.0)
    size = int(len(sample) / share * 0.99) - SPARE_PARTS if share else limit
    return size if size < limit else None
