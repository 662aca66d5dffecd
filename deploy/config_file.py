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
MAX_VALUES = 5_000
"""The most values of a file, with its aliases spelled out: ten lines of them can stand for billions."""

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Makes the values that JSON has, and of a date its text."""

    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    } | {"tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_str}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError) as error:  # of PyYAML's own, which names no line
            problem = f"the value is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class _Document:
    """The values of a YAML document, and the line, from 1, on which each key stands."""

    def __init__(self, text: str) -> None:
        """Read a document; raises yaml.YAMLError or ValueError for what is no table of plain values."""
        self.lines: dict[KeyPath, int] = {(): 1}
        self._num_values = 0
        loader = _Loader(text)
        root = loader.get_single_node()
        self._look_at(root, ())
        self.table = {} if root is None else loader.construct_document(root)

    def _look_at(self, node: yaml.Node | None, path: KeyPath) -> None:
        """Note the lines of what is in a node; that of an alias is looked at, and counted, each time."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values, with aliases spelled out")
        if len(path) > MAX_DEPTH:
            raise ValueError(f"tables and lists are nested more than {MAX_DEPTH} deep")
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                self._look_at(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                self._look_at_key(key, keys)
                self.lines[(*path, key.value)] = key.start_mark.line + 1
                self._look_at(value, (*path, key.value))

    def _look_at_key(self, node: yaml.Node, before: set[str]) -> None:
        """Raise YAMLError for a key that is no text, or that is among those `before`."""
        problem = ""
        if not isinstance(node, yaml.ScalarNode):
            problem = "a table or list is no key"
        elif node.tag == MERGE:
            return
        elif node.tag != yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG:
            problem = f"{node.value} is no key"
        elif node.value in before:
            problem = f"the key {node.value!r} stands here a second time"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        before.add(node.value)


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
