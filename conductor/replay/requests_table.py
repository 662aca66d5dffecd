"""The requests of a run as CSV or Parquet: one row each, completed or rejected, by number."""

from __future__ import annotations

import csv
from operator import itemgetter
from pathlib import Path

from conductor.replay.outcome import Outcomes
from conductor.replay.parquet import Column, Kind, Value, parquet
from conductor.replay.trace import open_trace

COLUMNS = {
    "request": Kind.INT,
    "arrival_s": Kind.FLOAT,
    "end": Kind.TEXT,
    "prompt_tokens": Kind.INT,
    "output_tokens": Kind.INT,
    "cached_tokens": Kind.INT,
    "prefill_node": Kind.TEXT,
    "decode_node": Kind.TEXT,
    "queue_s": Kind.FLOAT,
    "prefill_s": Kind.FLOAT,
    "ttft_s": Kind.FLOAT,
    "tbt_s": Kind.FLOAT,
    "mean_tbt_s": Kind.FLOAT,
}


def write_requests(outcomes: Outcomes, path: Path) -> None:
    """Write a run's requests: Parquet where the name ends in .parquet, else CSV; gzipped where in .gz."""
    rows = _rows(outcomes)
    if path.suffix == ".parquet":
        columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        path.write_bytes(
            parquet([Column(*about, values) for about, values in zip(COLUMNS.items(), columns, strict=True)])
        )
        return
    with open_trace(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row] for row in rows)


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
    nothing = (None,) * (len(COLUMNS) - 3)
    rows += [(refused.number, refused.arrival_s, refused.reason, *nothing) for refused in outcomes.refused]
    rows.sort(key=itemgetter(0))
    return rows
