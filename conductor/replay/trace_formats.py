"""Trace files: the formats that `conductor replay` reads, plain or gzipped.

* Mooncake, JSON Lines: `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
  "hash_ids": [int, ...]}`; `created_time`, `input_tokens` and `output_tokens` are other names
  for the first three. A header line `{"block_size": N}` or a flag says how many tokens an id
  stands for; without either it is 512, as in the public traces, and every row is checked.
* The same with sessions: `session_id`, and `delay` or `delay_ms` instead of `timestamp`. Such a
  row is sent that long after the row before it of its session was answered (closed loop).
* Bailian (Qwen's usage traces), JSON Lines with `chat_id`: seconds, and ids of 16 tokens.
* BurstGPT, CSV with `Request tokens` and `Response tokens`, seconds; and Azure's LLM traces,
  CSV with `ContextTokens` and `GeneratedTokens` and a date. Neither has shared prefixes:
  every prompt gets blocks of its own.
* A conductor's decision log (docs/reference/decision-log.md): what was asked of a live cluster.

An id names a block of tokens together with all before it, so what comes before an id is the
same wherever it occurs. That is checked: the caches rely on it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import ConfigError
from conductor.replay.trace import DEFAULT_BLOCK_SIZE, Trace, TraceRequest, open_trace

BAILIAN_BLOCK_SIZE = 16

ALIASES = {"created_time": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length"}

MAX_REASONS = 10

Row = dict[str, Any]


class _Read(NamedTuple):
    """One good row: its request, and where it belongs."""

    request: TraceRequest
    session: str | None = None
    follows: bool = False
    """Whether `arrival_s` is a delay after the row before it of its session."""


def read_trace(path: Path, block_size: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a trace in any of the formats.

    Args:
        path: `.jsonl` or `.csv`, either with `.gz`.
        block_size: Tokens an id; None: the header's, or the format's.
        skip_bad: Count bad rows instead of raising at the first.

    Raises:
        ConfigError: the file is missing, has no good row, or has a bad row (file, line
            and reason are named).
    """
    rows = _Rows(path, skip_bad)
    is_table = path.name.removesuffix(".gz").endswith(".csv")
    read, size = _table(rows, block_size) if is_table else _json_lines(rows, block_size)
    requests = _linked(read)
    if not requests:
        raise ConfigError(f"{path}: no request in it")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(path.name, size, requests, rows.num_bad, tuple(rows.reasons))


class _Rows:
    """Walks over a file's rows; keeps count of the bad ones."""

    def __init__(self, path: Path, skip_bad: bool) -> None:
        self.path = path
        self.num_bad = 0
        self.reasons: list[str] = []
        self._skip_bad = skip_bad

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield (number, line) of lines that are not empty."""
        try:
            with open_trace(self.path, "r") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, line
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def bad(self, number: int, error: ValueError) -> None:
        """Count a bad row, or raise."""
        reason = f"{self.path}:{number}: {error}"
        if not self._skip_bad:
            raise ConfigError(f"{reason} (--skip-bad passes over such rows)") from error
        self.num_bad += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason)


class _Chains:
    """Makes chains of ids: equal ids are one object, and each has one predecessor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}

    def chain(self, ids: Any, num_tokens: int, block_size: int) -> Sequence[int]:
        if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 1 << 63 for block in ids):
            raise ValueError("hash_ids: a list of numbers below 2^63 is wanted")
        if len(ids) != -(-num_tokens // block_size):
            raise ValueError(
                f"{len(ids)} hash_ids for {num_tokens} tokens; blocks of {block_size} make "
                f"{-(-num_tokens // block_size)} (--block-size says how long a block is)"
            )
        known, before, chain = self._known, -1, []
        for block in ids:
            block, predecessor = known.setdefault(block, (block, before))
            if predecessor != before:
                raise ValueError(
                    f"id {block} follows {before} here and {predecessor} elsewhere: "
                    "an id names a block with all before it"
                )
            chain.append(block)
            before = block
        return tuple(chain)


def _json_lines(rows: _Rows, block_size: int | None) -> tuple[list[_Read], int]:
    chains, read, size = _Chains(), list[_Read](), block_size
    for number, line in rows.lines():
        try:
            row = _json_object(line)
            if row.get("kind") == "conductor":
                return _decision_log(rows, block_size)
            if "block_size" in row and "input_length" not in row:
                size = size or _count(row, "block_size", 1)
                continue
            for alias, name in ALIASES.items():
                if alias in row:
                    row.setdefault(name, row[alias])
            is_bailian = "chat_id" in row
            size = size or (BAILIAN_BLOCK_SIZE if is_bailian else DEFAULT_BLOCK_SIZE)
            read.append(_request(row, chains, size, 1.0 if is_bailian else 1e-3))
        except ValueError as error:
            rows.bad(number, error)
    return read, size or DEFAULT_BLOCK_SIZE


def _request(row: Row, chains: _Chains, block_size: int, tick_s: float) -> _Read:
    session = None if row.get("session_id") is None else str(row["session_id"])
    delay = next((key for key in ("delay_ms", "delay") if key in row), None)
    follows = session is not None and delay is not None and "timestamp" not in row
    moment = delay if follows and delay is not None else "timestamp"
    if missing := [key for key in (moment, "input_length", "output_length", "hash_ids") if key not in row]:
        raise ValueError(f"{missing[0]} is missing")
    num_tokens = _count(row, "input_length", 1)
    chain = chains.chain(row["hash_ids"], num_tokens, block_size)
    arrival_s = _moment(row, moment) * tick_s
    return _Read(
        TraceRequest(arrival_s, num_tokens, _count(row, "output_length", 1), chain), session, follows
    )


def _linked(read: list[_Read]) -> list[TraceRequest]:
    """Return first turns, each with those that follow it."""
    sessions: dict[str, list[list[TraceRequest]]] = {}
    alone: list[TraceRequest] = []
    for request, session, follows in read:
        if session is None:
            alone.append(request)
            continue
        loops = sessions.setdefault(session, [])
        if follows and loops:
            loops[-1].append(request)
        else:
            loops.append([request])
    for loop in (loop for loops in sessions.values() for loop in loops):
        following: TraceRequest | None = None
        for request in reversed(loop):
            following = request._replace(next_turn=following)
        if following is not None:
            alone.append(following)
    return alone


def _table(rows: _Rows, block_size: int | None) -> tuple[list[_Read], int]:
    """Read a CSV file, of BurstGPT or Azure by its heads."""
    lines = rows.lines()
    heads = next(csv.reader([next(lines, (0, ""))[1]]), [])
    for names in TABLES:
        if set(names.columns) <= set(heads):
            break
    else:
        raise ConfigError(f"{rows.path}:1: columns {heads}: neither BurstGPT's nor Azure's")
    size, next_id, first_s, read = block_size or DEFAULT_BLOCK_SIZE, 0, None, list[_Read]()
    for number, line in lines:
        row = dict(zip(heads, next(csv.reader([line])), strict=False))
        try:
            if missing := [name for name in names.columns if not row.get(name)]:
                raise ValueError(f"{missing[0]} is missing")
            prompt, output = (_whole(row, name) for name in names.columns[1:])
            arrival_s = names.moment(row[names.columns[0]])
            first_s = arrival_s if first_s is None else first_s
            num_blocks = -(-prompt // size)
            chain = range(next_id, next_id + num_blocks)
            next_id += num_blocks
            read.append(_Read(TraceRequest(max(0.0, arrival_s - first_s), prompt, output, chain)))
        except ValueError as error:
            rows.bad(number, error)
    return read, size


class _Table(NamedTuple):
    columns: tuple[str, str, str]
    """Moment, prompt tokens, output tokens."""
    moment: Callable[[str], float]


def _date_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


TABLES = (
    _Table(("Timestamp", "Request tokens", "Response tokens"), float),
    _Table(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date_s),
)


def _decision_log(rows: _Rows, block_size: int | None) -> tuple[list[_Read], int]:
    """Read the first attempts in a decision log, with the outputs that they had."""
    asked: dict[str, Row] = {}
    outputs: dict[str, int] = {}
    size = block_size
    for number, line in rows.lines():
        row = _json_object(line)
        if row.get("kind") == "decision":
            size = size or int(row["seen"]["block_size"])
            asked[row["request_id"]] = row
        elif row.get("kind") == "outcome":
            outputs[row["request_id"]] = int(row["num_output_tokens"])
        elif number > 1:
            rows.bad(number, ValueError("neither a decision nor an outcome"))
    known: dict[object, int] = {}
    first_s = min((row["arrived_at_s"] for row in asked.values()), default=0.0)
    read = []
    for request_id, row in asked.items():
        told = row["asked"]
        chain = tuple([known.setdefault(key, len(known)) for key in told["chain"]])
        output = outputs.get(request_id, 0) or told["max_tokens"]
        arrival_s = row["arrived_at_s"] - first_s
        read.append(_Read(TraceRequest(arrival_s, told["num_tokens"], output, chain)))
    return read, size or DEFAULT_BLOCK_SIZE


def _json_object(line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("a JSON object is wanted")
    return row


def _moment(row: Row, key: str) -> float:
    moment = row[key]
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not 0 <= moment < 1e15:
        raise ValueError(f"{key}: a time that is not negative is wanted, not {moment!r}")
    return float(moment)


def _count(row: Row, key: str, least: int) -> int:
    value = row[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}: a whole number of at least {least} is wanted, not {value!r}")
    return value


def _whole(row: Row, key: str) -> int:
    value = int(row[key])
    if value < 1:
        raise ValueError(f"{key}: {value}, a request that failed")
    return value
