"""Tables: BurstGPT's and Azure's CSV files of requests without shared prefixes.

Every prompt gets blocks of its own. Rows may come in any order; the earliest is at second 0.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import NamedTuple

from base.errors import ConfigError
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, TraceRequest
from conductor.replay.trace_rows import TraceFile, text_count, text_date_s, text_seconds


class _Table(NamedTuple):
    columns: tuple[str, str, str]
    """Moment, prompt tokens, output tokens."""
    moment: Callable[[str, str], float]


TABLES = {
    "burstgpt": _Table(("Timestamp", "Request tokens", "Response tokens"), text_seconds),
    "azure": _Table(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), text_date_s),
}


def read_table(
    file: TraceFile, block_size: int | None, name: str | None
) -> tuple[list[TraceRequest], int, str]:
    """Return a CSV file's requests, its block size and the name of its format.

    Args:
        name: Of its format; None: as its heads say.

    Raises:
        ConfigError: its heads are no format's.
    """
    lines = file.lines()
    try:
        heads = next(csv.reader([next(lines, (0, ""))[1]]), [])
    except csv.Error as error:
        raise ConfigError(f"{file.path}:1: no columns: {error}") from None
    known = [each for each, table in TABLES.items() if set(table.columns) <= set(heads)]
    if not known or name not in (None, known[0]):
        wanted = f"not {name}'s" if name else "neither BurstGPT's nor Azure's"
        raise ConfigError(f"{file.path}:1: columns {str(heads)[:200]}: {wanted}")
    names = TABLES[known[0]]
    size, next_id, read = block_size or DEFAULT_BLOCK_SIZE, 0, list[TraceRequest]()
    for number, line in lines:
        try:
            row = dict(zip(heads, next(csv.reader([line])), strict=False))
            if missing := [each for each in names.columns if not row.get(each)]:
                raise ValueError(f"{missing[0]} is missing")
            at, prompt, output = names.columns
            arrival_s = names.moment(row[at], at)
            prompt_tokens, output_tokens = text_count(row[prompt], prompt), text_count(row[output], output)
        except (ValueError, csv.Error) as error:
            file.bad(number, ValueError(str(error)))
            continue
        chain = range(next_id, next_id + -(-prompt_tokens // size))
        next_id = chain.stop
        read.append(TraceRequest(arrival_s, prompt_tokens, output_tokens, chain))
    first_s = min((request.arrival_s for request in read), default=0.0)
    return [request._replace(arrival_s=request.arrival_s - first_s) for request in read], size, known[0]
