"""Faults of a replay: which node dies when, and when it comes back.

A file has one JSON object a line:

    {"at_s": 600, "node": "p3", "for_s": 120}

Without `for_s` the node stays away.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path

from base.errors import ConfigError
from base.tables import from_table


@dataclass(frozen=True, slots=True)
class NodeFault:
    """One node's absence."""

    at_s: float
    node: str
    for_s: float = inf


def read_faults(path: Path) -> tuple[NodeFault, ...]:
    """Read a fault file.

    Raises:
        ConfigError: file, line and reason.
    """
    faults = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                faults.append(from_table(NodeFault, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
    return tuple(faults)
