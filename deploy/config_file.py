"""Reading `cluster.yaml` into a `ClusterConfig`. The one door to pydantic and YAML here.

The dataclasses of `base/config.py` are the schema: pydantic takes fields, types and
defaults from them. What this file adds is the message. A person who mistypes a key is
told file, line and path of it and the nearest key there is; everything wrong with the
file is told at once.

Values are checked strictly, as JSON would be: the string "8000" is no port number. YAML
itself is read with the safe loader, and a key written twice is refused, because YAML's
own rule (the last one wins) hides an edit made in the wrong place.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from base.config import ClusterConfig
from base.errors import ConfigError

KeyPath = tuple[str | int, ...]
MAX_DEPTH = 20
MAX_VALUES = 10_000
"""In a file, with its aliases spelled out: ten lines of them can stand for billions."""

# pydantic speaks of Python; a person editing YAML thinks of these.
KIND_NAMES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dataclass_type": "a table of keys",
}


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key written twice."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    table: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is no key", key_node.start_mark)
        if key in table:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands here a second time", key_node.start_mark
            )
        table[key] = loader.construct_object(value_node, deep=True)
    return table


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_cluster_config(path: Path) -> ClusterConfig:
    """Read and check a cluster's configuration; an empty file is all defaults.

    Raises:
        ConfigError: one line for each thing wrong: file, line, key, what is wanted.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        _require_shallow(text)
        root = yaml.compose(text, yaml.SafeLoader)
        _require_bounded(root, {})
        table = yaml.load(text, _Loader)
        lines = _lines_of_keys(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise ConfigError(f"{where}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a table or list is within itself") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    document = json.dumps({} if table is None else table, default=str)
    try:
        return _schema().validate_json(document, strict=True)
    except ValidationError as error:
        told = [_sentence(path, lines, item) for item in error.errors()]
        raise ConfigError("\n".join(told)) from error


@functools.cache
def _schema() -> TypeAdapter[ClusterConfig]:
    """Built once: it takes as long as reading ten files."""
    return TypeAdapter(ClusterConfig)


def _require_shallow(text: str) -> None:
    """Raise ValueError for tables too deep for what reads them by calling itself."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"tables and lists are nested more than {MAX_DEPTH} deep")


def _require_bounded(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Return the values below `node`, an alias's each time; raises ValueError for too many."""
    if node is None or id(node) in counted:
        return counted.get(id(node), 0)
    parts = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    size = 1 + sum(_require_bounded(part, counted) for part in parts)
    if size > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values, with aliases spelled out")
    counted[id(node)] = size
    return size


def _lines_of_keys(root: yaml.Node | None) -> dict[KeyPath, int]:
    """Return the line, from 1, on which each key of a document stands."""
    lines: dict[KeyPath, int] = {(): 1}

    def visit(node: yaml.Node | None, path: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[(*path, key.value)] = key.start_mark.line + 1
                visit(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[(*path, index)] = item.start_mark.line + 1

    visit(root, ())
    return lines


def _sentence(path: Path, lines: dict[KeyPath, int], item: Any) -> str:
    """Return `file:line: key: what is wanted` for one of pydantic's errors."""
    where: KeyPath = item["loc"]
    if item["type"] == "value_error":
        # A dataclass's own check; its message opens with the key it is about.
        key, _, wanted = str(item["ctx"]["error"]).partition(": ")
        where = (*where, *key.split("."))
        problem = f"{wanted}; it is {_value_at(item['input'], key)}"
    elif item["type"] == "unexpected_keyword_argument":
        problem = f"unknown key{_nearest(where)}"
    elif item["type"] in KIND_NAMES:
        problem = f"{KIND_NAMES[item['type']]} is wanted, not {json.dumps(item['input'])}"
    else:
        problem = item["msg"]
    line = next((lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in lines), 1)
    name = ".".join(str(part) for part in where) or "the file"
    return f"{path}:{line}: {name}: {problem}"


def _value_at(table: Any, key: str) -> str:
    for part in key.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return "the default" if table is None else json.dumps(table)


def _nearest(where: KeyPath) -> str:
    known = known_keys(where[:-1])
    close = difflib.get_close_matches(str(where[-1]), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def known_keys(where: KeyPath = ()) -> list[str]:
    """Return the keys that may stand in the table at `where` of `cluster.yaml`."""
    kind: Any = ClusterConfig
    for part in where:
        kind = typing.get_type_hints(kind)[str(part)]
    return [item.name for item in dataclasses.fields(kind)]
