"""Reading `cluster.yaml` into a `ClusterConfig`. The one door to YAML here.

`base/tables.py` reads the values. What this file adds is YAML, and the line of each key: everything
wrong with the file is said at once, with file, line and path.

Values are made by the safe loader. A key written twice is refused, because YAML's own rule (the
last one wins) hides an edit made in the wrong place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from base.config import ClusterConfig
from base.errors import ConfigError
from base.tables import KeyPath, Problem, TableError, from_table

MAX_DEPTH = 20
MAX_VALUES = 10_000
"""The most values of a file, with its aliases spelled out: ten lines of them can stand for billions."""

MERGE = "tag:yaml.org,2002:merge"


class _Document:
    """The values of a YAML document, and the line, from 1, on which each key stands."""

    def __init__(self, text: str) -> None:
        """Read a document; raises yaml.YAMLError or ValueError for what is no table of plain values."""
        self.lines: dict[KeyPath, int] = {(): 1}
        self._num_values = 0
        self._made: dict[int, tuple[Any, int]] = {}
        """The value of each node, and how many values it is with those within it."""
        self._loader = yaml.SafeLoader("")
        root = yaml.compose(text, yaml.SafeLoader)
        self.table = {} if root is None else self._value(root, ())

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return a node's value; that of an alias is made once, and counted each time."""
        value, num_values = self._made.get(id(node), (None, 1))
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, with aliases spelled out")
        if id(node) not in self._made:
            num_before = self._num_values - 1
            value = self._new_value(node, path)
            self._made[id(node)] = value, self._num_values - num_before
        return value

    def _new_value(self, node: yaml.Node, path: KeyPath) -> Any:
        if len(path) > MAX_DEPTH:
            raise ValueError(f"tables and lists are nested more than {MAX_DEPTH} deep")
        if isinstance(node, yaml.ScalarNode):
            value = self._loader.construct_object(node)
            is_plain = value is None or isinstance(value, bool | int | float | str)
            return value if is_plain else str(value)  # as JSON would have it: a date is its text
        if node.tag == yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG:
            return self._table(node, path)
        if node.tag != yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG:
            problem = f"could not determine a constructor for the tag {node.tag!r}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        items = list(enumerate(node.value))
        self.lines.update({(*path, index): item.start_mark.line + 1 for index, item in items})
        return [self._value(item, (*path, index)) for index, item in items]

    def _table(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        table: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag == MERGE:
                tables = self._value(value_node, (*path, key))
                for each in reversed(tables if isinstance(tables, list) else [tables]):
                    if not isinstance(each, dict):
                        raise ValueError("<<: a table, or a list of them, is wanted")
                    merged.update(each)
                continue
            if key_node.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
                what = f"{key} is no key" if isinstance(key, str) else "a table or list is no key"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            if key in table:
                problem = f"the key {key!r} stands here a second time"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            table[key] = self._value(value_node, (*path, key))
        return {**merged, **table}


def read_cluster_config(path: Path | None) -> ClusterConfig:
    """Read and check a cluster's configuration; an empty file, or none, is all defaults.

    Raises:
        ConfigError: one line for each thing wrong: file, line, key, what is wanted.
    """
    if path is None:
        return ClusterConfig()
    try:
        document = _Document(path.read_text())
        return from_table(ClusterConfig, document.table)
    except TableError as error:
        problems = (_sentence(path, document.lines, problem) for problem in error.problems)
        raise ConfigError("\n".join(problems)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise ConfigError(f"{where}: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: tables and lists are nested too deep") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _sentence(path: Path, lines: dict[KeyPath, int], problem: Problem) -> str:
    """Return `file:line: key: what is wanted`."""
    where = problem.where
    line = next((lines[where[:n]] for n in range(len(where), -1, -1) if where[:n] in lines), 1)
    return f"{path}:{line}: {problem}"
