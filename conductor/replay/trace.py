"""Traces: requests with arrival times and block chains, and how they arrive.

A trace file is read by `read_trace`, in any of the formats of `trace_formats.py`. A bad row
is an error with file, line and reason, because a trace that is silently short answers
another question. `skip_bad` counts such rows instead.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TextIO

DEFAULT_BLOCK_SIZE = 512
"""Tokens of a block of Mooncake's public traces."""


class TraceRequest(NamedTuple):
    """One row; a tuple because a run makes one for each arrival."""

    arrival_s: float
    num_tokens: int
    output_tokens: int
    chain: Sequence[int]
    """Ids of the prompt's blocks, the last one partial."""
    next_turn: TraceRequest | None = None
    """The next request of the session; its `arrival_s` counts from the end of this request."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file, by arrival."""

    name: str
    block_size: int
    requests: Sequence[TraceRequest]
    """First turns, and all requests that are of no session."""
    num_bad: int = 0
    bad_rows: tuple[str, ...] = field(default=())
    """The first few reasons."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last that the file fixes."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def num_requests(self) -> int:
        """Requests, later turns included."""
        return sum(len(turns(request)) for request in self.requests)


def turns(request: TraceRequest) -> list[TraceRequest]:
    """Return a request and the turns that follow it."""
    found = [request]
    while (following := found[-1].next_turn) is not None:
        found.append(following)
    return found


def write_trace(trace: Trace, path: Path) -> None:
    """Write what `read_trace` reads, header included."""
    with open_trace(path, "w") as file:
        file.write(json.dumps({"block_size": trace.block_size}) + "\n")
        for number, first in enumerate(trace.requests):
            session = turns(first)
            for turn, request in enumerate(session):
                row: dict[str, object] = {"session_id": str(number)} if len(session) > 1 else {}
                row["delay_ms" if turn else "timestamp"] = round(request.arrival_s * 1000)
                row["input_length"] = request.num_tokens
                row["output_length"] = request.output_tokens
                row["hash_ids"] = list(request.chain)
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
    if speed == 1.0 and scale == 1 and not jitter_s:
        yield from trace.requests[:limit]
        return
    rng = Random(seed)
    rows: list[tuple[float, TraceRequest]] = []
    for request in trace.requests[:limit]:
        shift_s = rng.random() * jitter_s if jitter_s else 0.0
        rows.append(((request.arrival_s + shift_s) / speed, request))
    rows.sort(key=lambda row: row[0])
    stride = (
        1 + max(joined.from_iterable(_ids(request) for _, request in rows), default=0) if scale > 1 else 0
    )
    for arrival_s, request in rows:
        for copy in range(scale):
            yield _moved(request, arrival_s, speed, copy * stride)


def _ids(request: TraceRequest) -> Iterator[int]:
    for turn in turns(request):
        yield from turn.chain


def _moved(request: TraceRequest, arrival_s: float, speed: float, offset: int) -> TraceRequest:
    """Return a request, and its later turns, at another pace and with other blocks."""
    if not offset and request.next_turn is None:
        return request if arrival_s == request.arrival_s else request._replace(arrival_s=arrival_s)
    following: TraceRequest | None = None
    for turn in reversed(turns(request)):
        chain = tuple([block + offset for block in turn.chain]) if offset else turn.chain
        following = turn._replace(arrival_s=turn.arrival_s / speed, chain=chain, next_turn=following)
    assert following is not None
    return following._replace(arrival_s=arrival_s)


def open_trace(path: Path, mode: Literal["r", "w"]) -> TextIO:
    """Open a file of text, gzipped where its name ends in .gz; the same text gives the same bytes."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, f"{mode}b", mtime=0))
    return path.open(mode)
