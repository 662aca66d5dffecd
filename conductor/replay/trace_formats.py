"""Trace files: the formats that `conductor replay` reads, plain or gzipped.

* `mooncake`, JSON Lines: `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
  "hash_ids": [int, ...]}`; `created_time`, `input_tokens` and `output_tokens` are other names
  for the first three. A header line `{"block_size": N}` or a flag says how many tokens an id
  stands for; without either it is 512, as in the public traces, and every row is checked.
  With `session_id`, and `delay` or `delay_ms` instead of `timestamp`, a row is sent that long
  after the row before it of its session was answered (closed loop).
* `aiperf`: the same rows, each with what is new in its turn (`trace_sessions.py`).
* `weka` and `tracelab`: recorded agents (`trace_agents.py`).
* `bailian` (Qwen's usage traces), JSON Lines with `chat_id`: seconds, and ids of 16 tokens.
* `burstgpt` and `azure`: tables (`trace_tables.py`).
* `decisions`: a conductor's decision log (docs/reference/decision-log.md), what was asked of a live cluster.

Which it is shows in the fields of its first row, or is said by a header `{"format": NAME}` or by a flag. Rows
of sessions may hold whole prompts or what is new: where neither shows, reading is refused, not guessed.
A row may name its client's `priority` and `tenant`.

An id names a block of tokens together with all before it, so what comes before an id is the
same wherever it occurs. That is checked: the caches rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as joined
from pathlib import Path

from base.errors import ConfigError
from conductor.replay.chains import KnownBlocks
from conductor.replay.decision_log import asked_in_log
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, Trace, TraceRequest
from conductor.replay.trace_agents import tracelab_sessions, weka_sessions
from conductor.replay.trace_rows import (
    Row,
    TraceFile,
    TraceRow,
    block_ids,
    client,
    count,
    json_object,
    moment,
    require_length,
)
from conductor.replay.trace_sessions import grown_sessions, holds_new_tokens, whole_sessions
from conductor.replay.trace_tables import TABLES, read_table

FORMATS = ("mooncake", "aiperf", "weka", "tracelab", "bailian", *TABLES, "decisions")

BAILIAN_BLOCK_SIZE = 16

DATES_S = 1e8
"""Times of a trace that begins later than this are dates (since 1970), and count from its first request."""

ALIASES = {"created_time": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}

Lines = Iterator[tuple[int, str]]


def read_trace(
    path: Path, block_size: int | None = None, skip_bad: bool = False, name: str | None = None
) -> Trace:
    """Read a trace in any of the formats.

    Args:
        path: `.jsonl` or `.csv`, either with `.gz`; or `.json`, one object.
        block_size: Tokens an id; None: the header's, or the format's.
        skip_bad: Count bad rows instead of raising at the first.
        name: The format's, one of FORMATS; None: the one that the file shows.

    Raises:
        ConfigError: the file is missing, has no good row, has a bad row (file, line and reason
            are named), or may be of two formats.
    """
    file = TraceFile(path, skip_bad)
    if path.name.removesuffix(".gz").endswith(".csv"):
        requests, size, known = read_table(file, block_size, name)
    elif name in TABLES:
        raise ConfigError(f"{path}: --format {name}: its files are named .csv")
    else:
        requests, size, known = _json_lines(file, block_size, name)
    if not requests:
        raise ConfigError("; passed over ".join([f"{path}: no request in it", *file.reasons[:1]]))
    requests.sort(key=lambda request: request.arrival_s)
    if (first_s := requests[0].arrival_s) >= DATES_S:
        requests = [request._replace(arrival_s=request.arrival_s - first_s) for request in requests]
    return Trace(path.name, size, requests, file.num_bad, tuple(file.reasons), known)


def _json_lines(
    file: TraceFile, block_size: int | None, name: str | None
) -> tuple[list[TraceRequest], int, str]:
    lines = file.lines()
    if file.path.name.removesuffix(".gz").endswith(".json"):
        # one object, over as many lines as it likes
        lines = iter([(1, "".join(line for _, line in lines))])
    header, first, rest = _opened(file, lines)
    known = name or _named_format(header, file) or _shown_format(first)
    size = block_size
    if size is None and "block_size" in header:
        try:
            size = count(header, "block_size", 1)
        except ValueError as error:
            file.bad(1, error)
    if known == "decisions":
        return *asked_in_log(file, block_size), known
    if known == "weka":
        return *weka_sessions(file, rest, size), known
    if known == "tracelab":
        return *tracelab_sessions(file, rest, size), known
    return _rows(file, rest, size, known)


def _opened(file: TraceFile, lines: Lines) -> tuple[Row, Row, Lines]:
    """Return a file's header, its first row, and the lines from that row on."""
    header: Row = {}
    for number, line in lines:
        try:
            row = json_object(line)
        except ValueError as error:
            file.bad(number, error)
            continue
        if row.keys() <= {"block_size", "format"}:
            header |= row
            continue
        return header, row, joined([(number, line)], lines)
    return header, {}, iter(())


def _named_format(header: Row, file: TraceFile) -> str | None:
    if "format" not in header:
        return None
    if header["format"] not in FORMATS:
        raise ConfigError(f"{file.path}:1: format: one of {', '.join(FORMATS)} is wanted")
    return str(header["format"])


def _shown_format(first: Row) -> str | None:
    """Return the format that a first row shows; None: rows that may be whole prompts or not."""
    if first.get("kind") == "conductor":
        return "decisions"
    if "requests" in first and "input_length" not in first:
        return "weka"
    if "input_tokens_total" in first:
        return "tracelab"
    return "bailian" if "chat_id" in first else None


def _rows(
    file: TraceFile, lines: Lines, block_size: int | None, name: str | None
) -> tuple[list[TraceRequest], int, str]:
    """Read rows with `input_length`, in any of three formats."""
    size = block_size or (BAILIAN_BLOCK_SIZE if name == "bailian" else DEFAULT_BLOCK_SIZE)
    ids, read = KnownBlocks(), list[TraceRow]()
    for number, line in lines:
        try:
            row = json_object(line)
            for alias, other in ALIASES.items():
                if alias in row:
                    row.setdefault(other, row[alias])
            read.append(_row(row, number, ids, size, name))
        except ValueError as error:
            file.bad(number, error)
    if name == "aiperf" or (name is None and holds_new_tokens(read, file)):
        return grown_sessions(read, size, file), size, "aiperf"
    return whole_sessions([row for row in read if _is_whole(row, ids, file)]), size, name or "mooncake"


def _is_whole(row: TraceRow, ids: KnownBlocks, file: TraceFile) -> bool:
    """Return whether a row is good as a whole prompt."""
    try:
        ids.require_order(row.request.chain)
    except ValueError as error:
        file.bad(row.number, error)
        return False
    return True


def _row(row: Row, number: int, ids: KnownBlocks, block_size: int, name: str | None) -> TraceRow:
    session = None if row.get("session_id") is None else str(row["session_id"])
    delay = next((key for key in ("delay_ms", "delay") if key in row), None)
    follows = session is not None and delay is not None and "timestamp" not in row
    when = delay if follows and delay is not None else "timestamp"
    wanted = ["input_length", "output_length"]
    if name != "aiperf":
        wanted = [when, *wanted, "hash_ids"]
    if missing := [key for key in wanted if key not in row]:
        raise ValueError(f"{missing[0]} is missing")
    num_tokens, output_tokens = count(row, "input_length", 1), count(row, "output_length", 0)
    chain: tuple[int, ...] = ()
    if has_ids := "hash_ids" in row:
        given = block_ids(row["hash_ids"])
        require_length(given, num_tokens, block_size)
        chain = ids.interned(given)
    arrival_s = moment(row, when) * (1.0 if name == "bailian" else 1e-3) if when in row else 0.0
    request = TraceRequest(arrival_s, num_tokens, output_tokens, chain, None, (), *client(row))
    is_restart = row.get("is_restart") is True
    return TraceRow(number, request, session, follows, has_ids, is_restart, is_restart or "group_id" in row)
