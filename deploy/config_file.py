"""Reading `cluster.yaml` into a `ClusterConfig`. The one door to YAML here.

`base/tables.py` reads the values. What this file adds is YAML, and the line of each key: everything
wrong with the file is said at once, with file, line and path.

YAML is read with the safe loader, and a key written twice is refused, because YAML's own rule (the
last one wins) hides an edit made in the wrong place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from base.config import ClusterConfig
from base.errors import ConfigError
from base.tables import KeyPath, Problem, TableError, from_table

MAX_DEPTH = 20
MAX_VALUES = 10_000
"""In a file, with its aliases spelled out: ten lines of them can stand for billions."""


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
    # as JSON would be: a date is its text
    document = json.loads(json.dumps({} if table is None else table, default=str))
    try:
        return from_table(ClusterConfig, document)
    except TableError as error:
        raise ConfigError("\n".join(_sentence(path, lines, item) for item in error.problems)) from error


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


def _sentence(path: Path, lines: dict[KeyPath, int], problem: Problem) -> str:
    """Return `file:line: key: what is wanted`."""
    where = problem.where
    line = next((lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in lines), 1)
    return f"{path}:{line}: {problem}"
