"""Schemas that cannot be followed token by token, narrowed to ones that can.

The library refuses keywords that say what a value is *not*, or that compare parts of it. An answer need not
be any value that is valid, only some: so a schema may be exchanged for a narrower one, of which every value
is valid by the first. That is what each rule here keeps, and nothing else:

    format of no known name     says nothing
    not                         the complement, as far as it can be said
    oneOf                       one branch, and the complements of the others
    if, then, else              if and then; or else, and the complement of if
    dependencies                those that are named are there, or what depends on them is not
    contains                    all items are such
    minProperties, maxProperties   so many named properties, all required
    anyOf                       those ways that can be followed
    any of these beside enum    those of the values that are valid

A schema that no rule helps is refused as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "definitions", "$defs", "$comment", "comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"format", "contentEncoding", "contentMediaType"}
)
NARROWED = frozenset(
    {"not", "oneOf", "if", "then", "else", "contains"}
    | {"dependencies", "dependentRequired", "dependentSchemas"}
)
DEFINING = frozenset({"definitions", "$defs", "$schema"})
MAPS = ("properties", "patternProperties", "definitions", "$defs")
LISTS = ("allOf", "oneOf", "prefixItems")
PARTS = ("items", "additionalProperties", "additionalItems", "propertyNames", "contains")
_BOUNDS = {
    # keyword -> the type it is about, the keyword of the complement, and how far that is away
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
MAX_DEPTH = 32
"""References that are followed within each other, when a complement is looked for."""


class CannotNarrowError(ValueError):
    """No rule makes the schema narrower."""


def narrowed(schema: Schema, is_known_format: Callable[[str], bool]) -> Schema:
    """Return a schema that can be followed, of which all values are valid by `schema`.

    Raises CannotNarrowError; what is returned may have none, or be beyond the library after all."""
    return _Narrowing(schema, is_known_format).narrow(schema)


class _Narrowing:
    """One schema at work; references lead into it."""

    def __init__(self, root: Schema, is_known_format: Callable[[str], bool]) -> None:
        self._is_known_format = is_known_format
        kind = validator_for(root, default=Draft202012Validator)
        self._validator = kind(root)
        resource = DRAFT202012.create_resource(root)
        self._resolver = Registry().with_resource("", resource).resolver()

    def narrow(self, schema: Schema) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise CannotNarrowError("a schema is an object, true or false")
        if NARROWED & schema.keys() or "allOf" in schema:
            values = self._values(schema)
            if values is not None:
                kept = {key: value for key, value in schema.items() if key in DEFINING}
                return {**kept, "enum": [item for item in values if self._is_valid(schema, item)]}
        result = self._with_narrow_parts(schema)
        if "format" in result and not self._is_known_format(str(result["format"])):
            del result["format"]
        for rule in (_contains, _depending, self._conditional, self._without_not, self._one_of, _counted):
            result = rule(result)
        return result

    def _with_narrow_parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        result = dict(schema)
        for key in MAPS:
            if isinstance(result.get(key), dict):
                result[key] = {name: self.narrow(part) for name, part in result[key].items()}
        if isinstance(result.get("anyOf"), list):
            result["anyOf"] = self._some(result["anyOf"])
        for key in (*LISTS, *PARTS):
            if isinstance(result.get(key), list):
                result[key] = [self.narrow(part) for part in result[key]]
            elif key in PARTS and isinstance(result.get(key), dict):
                result[key] = self.narrow(result[key])
        return result

    def _some(self, parts: list[Any]) -> list[Schema]:
        """Return those of several ways that can be followed."""
        found, error = [], CannotNarrowError("anyOf: it is empty")
        for part in parts:
            try:
                found.append(self.narrow(part))
            except CannotNarrowError as failed:
                error = failed
        if not found:
            raise error
        return found

    def _values(self, schema: dict[str, Any]) -> list[Any] | None:
        """Return values among which all valid ones are, if the schema lists them."""
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
        for part in schema.get("allOf", ()):
            if isinstance(part, dict) and NARROWED & _all_keys(schema["allOf"]):
                found = self._values(part)
                if found is not None:
                    return found
        return None

    def _is_valid(self, schema: Schema, value: Any) -> bool:
        try:
            return bool(self._validator.evolve(schema=schema).is_valid(value))
        except (SchemaError, ValidationError, Unresolvable, TypeError, AttributeError) as error:
            raise CannotNarrowError(str(error)) from None

    def _conditional(self, schema: dict[str, Any]) -> dict[str, Any]:
        condition, then, other = (schema.pop(key, None) for key in ("if", "then", "else"))
        if condition is None:
            return schema
        ways: list[Schema] = [_all_of(self.narrow(condition), self.narrow(True if then is None else then))]
        complement = self._complement_or_none(condition)
        if complement is not None:
            ways.append(_all_of(complement, self.narrow(True if other is None else other)))
        return _with(schema, {"anyOf": ways})

    def _without_not(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "not" not in schema:
            return schema
        wrong = schema.pop("not")
        return _with(schema, self.complement(wrong, 0))

    def _one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        branches = schema.pop("oneOf", None)
        if not isinstance(branches, list):
            return schema
        complements = [self._complement_or_none(branch) for branch in branches]
        ways = []
        for at, branch in enumerate(branches):
            others = [item for other, item in enumerate(complements) if other != at]
            if all(item is not None for item in others):
                ways.append(_all_of(branch, *(item for item in others if item is not None)))
        if not ways:
            raise CannotNarrowError("oneOf: no branch can be distinguished from the others")
        return _with(schema, {"anyOf": ways})

    def _complement_or_none(self, schema: Schema, depth: int = 0) -> Schema | None:
        try:
            return self.complement(schema, depth)
        except CannotNarrowError:
            return None

    def complement(self, schema: Schema, depth: int) -> Schema:
        """Return a schema of which no value is valid by `schema`; raises CannotNarrowError."""
        if isinstance(schema, bool):
            return not schema
        if depth > MAX_DEPTH:
            raise CannotNarrowError("not: it refers to itself")
        ways = [way for key, value in schema.items() for way in self._ways_out(schema, key, value, depth)]
        if not ways:
            if schema.keys() <= ANNOTATIONS:
                return False
            raise CannotNarrowError("not: nothing in it can be turned around")
        return ways[0] if len(ways) == 1 else {"anyOf": ways}

    def _ways_out(self, schema: dict[str, Any], key: str, value: Any, depth: int) -> Iterator[Schema]:
        """Yield schemas of values that break the keyword `key`."""
        if key in _BOUNDS and isinstance(value, int | float):
            kind, other, distance = _BOUNDS[key]
            if not (distance < 0 and value < 1):
                yield {"type": kind, other: value + distance}
        elif key in ("enum", "const"):
            yield from _other_values([value] if key == "const" else value)
        elif key == "required":
            yield from ({"type": "object", "properties": {name: False}} for name in value)
        elif key == "type":
            yield from _other_types(value)
        elif key == "not":
            yield self.narrow(value)
        elif key in ("anyOf", "oneOf"):
            parts = [self._complement_or_none(part, depth + 1) for part in value]
            if all(part is not None for part in parts):
                yield _all_of(*(part for part in parts if part is not None))
        else:
            yield from self._ways_out_of_parts(key, value, depth + 1)

    def _ways_out_of_parts(self, key: str, value: Any, depth: int) -> Iterator[Schema]:
        if key == "allOf":
            for part in value:
                if (found := self._complement_or_none(part, depth)) is not None:
                    yield found
        elif key == "properties":
            for name, part in value.items():
                found = self._complement_or_none(part, depth)
                if found is not None and found is not False:
                    yield {"type": "object", "required": [name], "properties": {name: found}}
        elif key == "items" and isinstance(value, dict):
            if (found := self._complement_or_none(value, depth)) is not None:
                yield {"type": "array", "minItems": 1, "items": found}
        elif key == "$ref":
            yield self.complement(self._referred(value), depth)

    def _referred(self, reference: Any) -> Schema:
        """Return what a reference within the schema is to."""
        try:
            found = self._resolver.lookup(reference).contents
        except (Unresolvable, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CannotNarrowError(f"$ref: {reference!r} leads nowhere in the schema") from error
        if not isinstance(found, dict | bool):
            raise CannotNarrowError(f"$ref: {reference!r} is to no schema")
        return found


def _contains(schema: dict[str, Any]) -> dict[str, Any]:
    """Have all items be such as are to be contained."""
    wanted = schema.pop("contains", None)
    least, most = schema.pop("minContains", 1), schema.pop("maxContains", None)
    if wanted is None or (least == 0 and most is None):
        return schema
    if "prefixItems" in schema or isinstance(schema.get("items"), list):
        raise CannotNarrowError("contains: beside items that differ")
    items = schema.get("items", True)
    limits: dict[str, Any] = {"minItems": max(schema.get("minItems", 0), least)}
    if most is not None:
        limits["maxItems"] = min(schema.get("maxItems", most), most)
    return {**schema, "items": _all_of(items, wanted), **limits}


def _depending(schema: dict[str, Any]) -> dict[str, Any]:
    """Require what others depend on; where it is no name, its schema holds always."""
    rules: dict[str, Any] = {}
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        rules |= schema.pop(key, None) or {}
    for name, wanted in rules.items():
        if name not in schema.get("required", ()):
            wanted = {"properties": {name: False}}  # Who is not there has no wishes.
        schema = _with(schema, {"required": wanted} if isinstance(wanted, list) else wanted)
    return schema


def _counted(schema: dict[str, Any]) -> dict[str, Any]:
    """Require as many of the named properties as there must be, where not all are required."""
    properties, required = schema.get("properties"), list(schema.get("required", ()))
    if not properties or not {"minProperties", "maxProperties"} & schema.keys():
        return schema
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(properties) + len(required))
    possible = [name for name, part in properties.items() if part is not False and name not in required]
    chosen = [*required, *possible[: max(0, least - len(required))]]
    if not least <= len(chosen) <= most:
        raise CannotNarrowError("minProperties, maxProperties: not with the properties that are named")
    rest = {key: value for key, value in schema.items() if key not in ("minProperties", "maxProperties")}
    kept = {name: properties.get(name, schema.get("additionalProperties", True)) for name in chosen}
    return {
        **rest,
        "properties": kept,
        "required": chosen,
        "additionalProperties": False,
        "patternProperties": {},
    }


def _other_types(types: Any) -> Iterator[Schema]:
    named = {types} if isinstance(types, str) else set(types)
    # An integer is a number, and a number may be one.
    numeric = {"integer", "number"}
    gone = named | numeric if named & numeric else named
    others = [name for name in TYPES if name not in gone]
    if others:
        yield {"type": others}


def _other_values(values: list[Any]) -> Iterator[Schema]:
    """Yield schemas of values that are none of these."""
    kinds = {kind for value in values for kind in _KINDS_OF[type(value)]}
    others = [name for name in TYPES if name not in kinds]
    if others:
        yield {"type": others}
    for kind, name, least in ((str, "string", "minLength"), (list, "array", "minItems")):
        if sizes := [len(value) for value in values if isinstance(value, kind)]:
            yield {"type": name, least: max(sizes) + 1}


_KINDS_OF: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("integer", "number"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
"""The types of JSON Schema that a value of JSON may be of, by Python's."""


def _all_of(*parts: Schema) -> Schema:
    """Return the schema of values that are valid by all."""
    if False in parts:
        return False
    wanted = [part for part in parts if part is not True and part != {}]
    return wanted[0] if len(wanted) == 1 else {"allOf": wanted} if wanted else True


def _with(schema: dict[str, Any], more: Schema) -> dict[str, Any]:
    """Return `schema`, and `more` beside it."""
    if more is True:
        return schema
    return {**schema, "allOf": [*schema.get("allOf", ()), more]}


def _all_keys(schema: Any) -> set[str]:
    """Return every name of a member within `schema`."""
    if isinstance(schema, dict):
        return set(schema) | {key for value in schema.values() for key in _all_keys(value)}
    if isinstance(schema, list):
        return {key for value in schema for key in _all_keys(value)}
    return set()
