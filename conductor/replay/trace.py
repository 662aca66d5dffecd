"""Traces: requests with arrival times and block chains, read from files.

The format is Mooncake's public one, JSON Lines (plain or gzipped), one request a line:

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}

An id names a block of tokens together with all before it; the last block may be partial.
How many tokens a block has is not in the file: it is 512 in the public traces, and a
header line `{"block_size": N}` or a flag says otherwise. It is checked against every row.

A bad row is an error with file, line and reason, because a trace that is silently short
answers another question. `skip_bad` counts such rows instead.
"""

from __future__ import annotations

import gzip
import io
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TextIO

from base.errors import ConfigError

DEFAULT_BLOCK_SIZE = 512
"""Of Mooncake's public traces."""

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceRequest(NamedTuple):
    """One row; a tuple because a run makes one for each arrival."""

    arrival_s: float
    num_tokens: int
    output_tokens: int
    chain: Sequence[int]
    """Ids of the prompt's blocks, the last one partial."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file, by arrival."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    num_bad: int = 0
    bad_rows: tuple[str, ...] = field(default=())
    """The first few reasons."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0


MAX_REASONS = 10


def read_trace(path: Path, block_size: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a Mooncake trace.

    Args:
        path: `.jsonl`, or gzipped `.jsonl.gz`.
        block_size: Tokens per id; None: the header's, or 512.
        skip_bad: Count bad rows instead of raising at the first.

    Raises:
        ConfigError: the file is missing, has no good row, or has a bad row (file, line
            and reason are named).
    """
    requests: list[TraceRequest] = []
    reasons: list[str] = []
    num_bad = 0
    for number, line in _lines(path):
        try:
            row = _json_object(line)
            if "block_size" in row and "timestamp" not in row:
                block_size = block_size or _count(row, "block_size", 1)
                continue
            requests.append(_request(row, block_size or DEFAULT_BLOCK_SIZE))
        except ValueError as error:
            reason = f"{path}:{number}: {error}"
            if not skip_bad:
                raise ConfigError(f"{reason} (--skip-bad passes over such rows)") from error
            num_bad += 1
            if len(reasons) < MAX_REASONS:
                reasons.append(reason)
    if not requests:
        raise ConfigError(f"{path}: no request in it")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(path.name, block_size or DEFAULT_BLOCK_SIZE, requests, num_bad, tuple(reasons))


def write_trace(trace: Trace, path: Path) -> None:
    """Write what `read_trace` reads, header included."""
    with _open(path, "w") as file:
        file.write(json.dumps({"block_size": trace.block_size}) + "\n")
        for request in trace.requests:
            row = {
                "timestamp": round(request.arrival_s * 1000),
                "input_length": request.num_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.chain),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def arrivals(
    trace: Trace, speed: float, scale: int, jitter_s: float, limit: int | None, seed: int
) -> Iterator[TraceRequest]:
    """Yield the requests of `scale` copies of a trace, by arrival.

    A copy is another population of users with blocks of its own, arriving at the same
    moments. Made one at a time, since a thousand-node trace is large as objects.

    Args:
        trace: What to copy.
        speed: Times are divided by it.
        scale: Number of copies.
        jitter_s: Each arrival is moved by up to so many seconds of the trace, to undo the
            rounding of recorded times (the public conversation trace has bursts every 3 s).
        limit: Requests of the trace to use; None: all.
        seed: Of the jitter.
    """
    rng = Random(seed)
    rows: list[tuple[float, TraceRequest]] = []
    for request in trace.requests[:limit]:
        shift_s = rng.random() * jitter_s if jitter_s else 0.0
        rows.append(((request.arrival_s + shift_s) / speed, request))
    rows.sort(key=lambda row: row[0])
    stride = 1 + max((max(request.chain) for _, request in rows), default=0) if scale > 1 else 0
    for arrival_s, request in rows:
        for copy in range(scale):
            chain: Sequence[int] = request.chain
            if copy:
                offset = copy * stride
                chain = [block + offset for block in chain]
            yield TraceRequest(arrival_s, request.num_tokens, request.output_tokens, chain)


def _open(path: Path, mode: Literal["r", "w"]) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, f"{mode}b", mtime=0))
    return path.open(mode)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with _open(path, "r") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("a JSON object is wanted")
    return row


def _count(row: dict[str, Any], key: str, least: int) -> int:
    value = row[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}: a whole number of at least {least} is wanted, not {value!r}")
    return value


def _request(row: dict[str, Any], block_size: int) -> TraceRequest:
    if missing := [key for key in FIELDS if key not in row]:
        raise ValueError(f"{missing[0]} is missing")
    arrival = row["timestamp"]
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival < 1e15:
        raise ValueError(f"timestamp: milliseconds are wanted, not {arrival!r}")
    num_tokens = _count(row, "input_length", 1)
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 1 << 48 for block in ids):
        raise ValueError("hash_ids: a list of numbers below 2^48 is wanted")
    if len(ids) != -(-num_tokens // block_size):
        raise ValueError(
            f"{len(ids)} hash_ids for {num_tokens} tokens; blocks of {block_size} make "
            f"{-(-num_tokens // block_size)} (--block-size says how long a block is)"
        )
    return TraceRequest(arrival / 1000.0, num_tokens, _count(row, "output_length", 1), array("q", ids))
