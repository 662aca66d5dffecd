"""Reads the file that `serving/decision_log.py` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from base.errors import ConfigError
from base.request import RequestId
from conductor.placing.decision_lines import Shared, item_from, shared_from
from conductor.placing.decisions import Actual, Decision


def read_log(path: Path) -> tuple[Shared, Iterator[Decision | tuple[RequestId, Actual]]]:
    """Return what a file's decisions share, and its decisions and outcomes in order.

    Raises:
        ConfigError: it is no decision log, or one of another format.
    """
    lines = path.read_text(encoding="ascii").splitlines()
    try:
        shared = shared_from(json.loads(lines[0]))
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no decision log: {error}") from error
    return shared, (item_from(json.loads(line)) for line in lines[1:])
