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

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < inf or not self.for_s > 0:
            raise ValueError("at_s: a moment that is not negative is wanted, and for_s above 0")


def read_faults(path: Path) -> tuple[NodeFault, ...]:
    """Read a fault file.

    Raises:
        ConfigError: file, line and reason.
    """
    faults = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                faults.append(from_table(NodeFault, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
    return tuple(faults)
