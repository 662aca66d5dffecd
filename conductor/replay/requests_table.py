"""The requests of a run as CSV or Parquet: one row each, completed or rejected, by number."""

from __future__ import annotations

import csv
import importlib
from operator import itemgetter
from pathlib import Path

from base.errors import ConfigError
from conductor.replay.outcome import Outcomes
from conductor.replay.trace import open_trace

Value = int | float | str | None

COLUMNS = {
    "request": "int64",
    "arrival_s": "float64",
    "end": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "cached_tokens": "int64",
    "prefill_node": "string",
    "decode_node": "string",
    "queue_s": "float64",
    "prefill_s": "float64",
    "ttft_s": "float64",
    "tbt_s": "float64",
    "mean_tbt_s": "float64",
}
"""Each column's name, and what it holds by Arrow's word for it."""


def require_table(path: Path) -> None:
    """Raise ConfigError where the name asks for no table, or for Parquet and its library is not there."""
    if not path.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ConfigError(f"--requests {path}: a name with .csv, .csv.gz or .parquet at its end is wanted")
    if path.suffix != ".parquet":
        return
    try:
        # By name: a large library, for one option of one command.
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"--requests {path}: {error}; pip install 'conductor-cluster[parquet]', or name a .csv file"
        ) from error


def write_requests(outcomes: Outcomes, path: Path) -> None:
    """Write a run's requests: Parquet where the name ends in .parquet, else CSV; gzipped where in .gz."""
    rows = _rows(outcomes)
    if path.suffix == ".parquet":
        _write_parquet(rows, path)
        return
    with open_trace(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row] for row in rows)


def _write_parquet(rows: list[tuple[Value, ...]], path: Path) -> None:
    arrow = importlib.import_module("pyarrow")
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    arrays = [arrow.array(values, kind) for values, kind in zip(columns, COLUMNS.values(), strict=True)]
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(arrays, list(COLUMNS)), path)


def _rows(outcomes: Outcomes) -> list[tuple[Value, ...]]:
    rows: list[tuple[Value, ...]] = list(
        zip(
            outcomes.number,
            outcomes.arrival_s,
            ["completed"] * outcomes.num_completed,
            outcomes.num_tokens,
            outcomes.output_tokens,
            outcomes.prefix_tokens,
            outcomes.prefill_node,
            outcomes.decode_node,
            outcomes.queue_s,
            outcomes.prefill_s,
            outcomes.ttft_s,
            outcomes.tbt_s,
            outcomes.mean_tbt_s,
            strict=True,
        )
    )
    nothing = (None,) * (len(COLUMNS) - 5)
    rows += [
        (each.number, each.arrival_s, each.reason, each.num_tokens, each.output_tokens, *nothing)
        for each in outcomes.refused
    ]
    rows.sort(key=itemgetter(0))
    return rows
