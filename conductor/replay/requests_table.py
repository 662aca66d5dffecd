"""The requests of a run as CSV: one row each, completed or rejected, by number.

CSV alone: every tool that reads Parquet reads it, and no library is needed for it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from conductor.replay.outcome import Outcomes
from conductor.replay.trace import open_trace

HEADS = (
    "request",
    "arrival_s",
    "end",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "prefill_node",
    "decode_node",
    "queue_s",
    "prefill_s",
    "ttft_s",
    "tbt_s",
    "mean_tbt_s",
)


def write_requests(outcomes: Outcomes, path: Path) -> None:
    """Write a run's requests; gzipped where the name ends in .gz."""
    completed = zip(
        outcomes.number,
        (f"{moment:.6f}" for moment in outcomes.arrival_s),
        ("completed" for _ in outcomes.number),
        outcomes.num_tokens,
        outcomes.output_tokens,
        outcomes.prefix_tokens,
        outcomes.prefill_node,
        outcomes.decode_node,
        *(
            (f"{seconds:.6f}" for seconds in column)
            for column in (
                outcomes.queue_s,
                outcomes.prefill_s,
                outcomes.ttft_s,
                outcomes.tbt_s,
                outcomes.mean_tbt_s,
            )
        ),
        strict=True,
    )
    rejected = [
        (refused.number, f"{refused.arrival_s:.6f}", refused.reason, *[""] * (len(HEADS) - 3))
        for refused in outcomes.refused
    ]
    rows: list[Sequence[object]] = [*completed, *rejected]
    rows.sort(key=itemgetter(0))
    with open_trace(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADS)
        writer.writerows(rows)
