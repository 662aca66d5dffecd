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
from base.request import NodeId


@dataclass(frozen=True, slots=True)
class NodeFault:
    """One node's absence."""

    at_s: float
    node_id: NodeId
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
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if unknown := sorted(row.keys() - {"at_s", "node", "for_s"}):
                raise ValueError(f"{unknown[0]}: unknown key")
            fault = NodeFault(float(row["at_s"]), NodeId(str(row["node"])), float(row.get("for_s", inf)))
        except KeyError as error:
            raise ConfigError(f"{path}:{number}: {error} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        faults.append(fault)
    return tuple(faults)
