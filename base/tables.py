"""Tables of JSON's kinds of values to frozen dataclasses: the one reader of configurations.

The dataclasses are the schema: their fields, types, defaults and own checks. What is wrong with a
table is said all at once, each with the path of its key and the mend. Values are read strictly: the
text "8000" is no port number. Weighed and left: pydantic, which takes 0.15 s of a node's start.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from base.errors import ConfigError

T = TypeVar("T")

KeyPath = tuple[str | int, ...]

MOST = 1 << 1023
"""Integers below it are floats, too."""

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Problem(NamedTuple):
    """One thing wrong with a table."""

    where: KeyPath
    wanted: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.where)) or 'the file'}: {self.wanted}"


class TableError(ValueError):
    """A table cannot be read; its text has a line for each problem."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def from_table(into: type[T], table: Any, where: KeyPath = ()) -> T:
    """Return a dataclass from a table, which stands at `where`.

    Raises:
        TableError: a key is unknown or missing, or a value is of the wrong type or refused.
    """
    problems: list[Problem] = []
    value = _table(into, table, where, problems)
    if problems:
        raise TableError(problems)
    return typing.cast(T, value)


def _table(into: type, table: Any, where: KeyPath, problems: list[Problem]) -> Any:
    if not isinstance(table, dict):
        return _wanted("a table of keys", table, where, problems)
    num_before = len(problems)
    hints = typing.get_type_hints(into)
    fields = {item.name: item for item in dataclasses.fields(into)}
    unknown = (key for key in table if key not in fields)
    problems += [Problem((*where, key), f"unknown key{_nearest(key, fields)}") for key in unknown]
    values = {}
    for name, item in fields.items():
        if name in table:
            values[name] = _value(hints[name], table[name], (*where, name), problems)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            problems.append(Problem((*where, name), "missing"))
    if len(problems) > num_before:
        return None
    try:
        return into(**values)
    except ValueError as error:
        # A dataclass's own check; its message opens with the key it is about.
        key, _, wanted = str(error).partition(": ")
        problems.append(Problem((*where, *key.split(".")), f"{wanted}; it is {_value_at(table, key)}"))
        return None


def _value(kind: Any, value: Any, where: KeyPath, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _table(typing.cast(type, kind), value, where, problems)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            return _wanted("a list", value, where, problems)
        item_kind = typing.get_args(kind)[0]
        return tuple(_value(item_kind, item, (*where, at), problems) for at, item in enumerate(value))
    if kind is float and type(value) is int and abs(value) < MOST:
        return float(value)
    return value if type(value) is kind else _wanted(_NAMES[kind], value, where, problems)


def _wanted(kind: str, value: Any, where: KeyPath, problems: list[Problem]) -> None:
    problems.append(Problem(where, f"{kind} is wanted, not {json.dumps(value)}"))


def _value_at(table: Any, key: str) -> str:
    for part in key.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return "the default" if table is None else json.dumps(table)


def _nearest(key: str, known: typing.Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(str(key), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(names)}"


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds; raises ConfigError, naming the file, if it cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; raises ConfigError, naming the file, if there is none."""
    table = read_json(path)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: a JSON object is wanted")
    return table
