"""Traces: requests with arrival times and block chains, and how they arrive.

A trace file is read by `read_trace`, in any of the formats of `trace_formats.py`. A bad row
is an error with file, line and reason, because a trace that is silently short answers
another question. `skip_bad` counts such rows instead.
"""

from __future__ import annotations

import gzip
import heapq
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TextIO

from base.request import Slo
from conductor.replay.chains import Part, moved

DEFAULT_BLOCK_SIZE = 512
"""Tokens of a block of Mooncake's public traces."""

COPY_SPREAD_S = 60.0
"""Seconds of the trace by which a copy is late, at most. Copies that came at the same instants would be one
population in bursts as many times as high."""


class NamedBounds(NamedTuple):
    """Bounds that a request names itself, seconds, infinity for none; None: that of the run holds."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    longest_gap_s: float | None = None

    def over(self, usual: Slo) -> Slo:
        """Return the bounds of a request in a run with `usual` ones."""
        return Slo(*(own if own is not None else each for own, each in zip(self, usual, strict=True)))


BOUND_KEYS = ("slo_ttft_ms", "slo_tpot_ms", "slo_gap_ms")
"""Keys of a row's bounds, milliseconds, in the order of `NamedBounds`; null: there is none at all."""


class TraceRequest(NamedTuple):
    """One row; a tuple because a run makes one for each arrival."""

    arrival_s: float
    num_tokens: int
    output_tokens: int
    chain: Sequence[int]
    """Ids of the prompt's blocks, the last one partial."""
    next_turn: TraceRequest | None = None
    """The next request of the session; its `arrival_s` counts from the end of this request."""
    forks: tuple[TraceRequest, ...] = ()
    """First requests of what goes on beside the session, a subagent each; `arrival_s` as of `next_turn`."""
    priority: int = 0
    tenant: str = ""
    bounds: NamedBounds | None = None
    """Bounds that it names; None: those of the run hold."""


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
    format: str = "mooncake"
    """The name of its format, one of `trace_formats.FORMATS`."""

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last that the file fixes."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def num_requests(self) -> int:
        """Requests, later turns included."""
        return sum(1 for first in self.requests for _ in every_request(first))

    @property
    def num_sessions(self) -> int:
        """Sessions of two requests or more."""
        return sum(first.next_turn is not None or bool(first.forks) for first in self.requests)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(
            each.num_tokens + each.output_tokens for first in self.requests for each in every_request(first)
        )


def turns(request: TraceRequest) -> list[TraceRequest]:
    """Return a request and the turns that follow it, without what forks from them."""
    found = [request]
    while (following := found[-1].next_turn) is not None:
        found.append(following)
    return found


def every_request(first: TraceRequest) -> Iterator[TraceRequest]:
    """Yield a request and all that follows from it."""
    waiting = [first]
    while waiting:
        request: TraceRequest | None = waiting.pop()
        while request is not None:
            yield request
            waiting.extend(request.forks)
            request = request.next_turn


def linked(session: Sequence[TraceRequest]) -> TraceRequest:
    """Return the first of a session's requests, each with the one after it as its next turn."""
    following: TraceRequest | None = None
    for request in reversed(session):
        following = request._replace(next_turn=following)
    assert following is not None, "a session has a request"
    return following


def arrivals(
    trace: Trace,
    speed: float,
    scale: int,
    jitter_s: float,
    limit: int | None,
    seed: int,
    session_rate: float | None = None,
) -> Iterator[TraceRequest]:
    """Yield the requests of `scale` copies of a trace, by arrival.

    A copy is another population of users with blocks of its own, up to `COPY_SPREAD_S` later. Made one at a
    time, since a thousand-node trace is large as objects.

    Args:
        trace: What to copy.
        speed: Times are divided by it.
        scale: Number of copies.
        jitter_s: Each arrival is moved by up to so many seconds of the trace, to undo the
            rounding of recorded times (the public conversation trace has bursts every 3 s).
        limit: Requests of the trace to use, first turns where it has sessions; None: all.
        seed: Of the jitter, of how late copies are, and of the rate.
        session_rate: Sessions (or requests of none) begin so often a second, by a Poisson process, in the
            order in which they came; None: when the file says.
    """
    rows = _copies(trace, speed, scale, jitter_s, limit, seed)
    if session_rate is None:
        yield from rows
        return
    rng, now_s = Random(f"rate {seed}"), 0.0
    for row in rows:
        now_s += rng.expovariate(session_rate)
        yield row._replace(arrival_s=now_s)


def _copies(
    trace: Trace, speed: float, scale: int, jitter_s: float, limit: int | None, seed: int
) -> Iterator[TraceRequest]:
    if speed == 1.0 and scale == 1 and not jitter_s:
        yield from trace.requests[:limit]
        return
    rng = Random(seed)
    rows: list[tuple[float, TraceRequest]] = []
    for request in trace.requests[:limit]:
        shift_s = rng.random() * jitter_s if jitter_s else 0.0
        rows.append(((request.arrival_s + shift_s) / speed, request))
    rows.sort(key=itemgetter(0))
    stride = 1 + max((_highest_id(request) for _, request in rows), default=0) if scale > 1 else 0
    late_s = [0.0, *(rng.random() * COPY_SPREAD_S / speed for _ in range(1, scale))]

    def copy(number: int) -> Iterator[tuple[float, int, TraceRequest]]:
        return ((arrival_s + late_s[number], number, request) for arrival_s, request in rows)

    for arrival_s, number, request in heapq.merge(*map(copy, range(scale)), key=itemgetter(0)):
        yield _moved(request, arrival_s, speed, number * stride)


def _highest_id(first: TraceRequest) -> int:
    return max((max(each.chain, default=0) for each in every_request(first)), default=0)


def _moved(request: TraceRequest, arrival_s: float, speed: float, offset: int) -> TraceRequest:
    """Return a request, and all that follows from it, at another pace and with other blocks."""
    if not offset and request.next_turn is None and not request.forks:
        return request if arrival_s == request.arrival_s else request._replace(arrival_s=arrival_s)
    return _changed(request, speed, offset, {})._replace(arrival_s=arrival_s)


def _changed(first: TraceRequest, speed: float, offset: int, known: dict[int, Part]) -> TraceRequest:
    return linked(
        [
            turn._replace(
                arrival_s=turn.arrival_s / speed,
                chain=moved(turn.chain, offset, known) if offset else turn.chain,
                forks=tuple(_changed(fork, speed, offset, known) for fork in turn.forks),
            )
            for turn in turns(first)
        ]
    )


def open_trace(path: Path, mode: Literal["r", "w"]) -> TextIO:
    """Open a file of text, gzipped where its name ends in .gz; the same text gives the same bytes.

    A byte order mark, as spreadsheets write it, is passed over.
    """
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(path, f"{mode}b", mtime=0), encoding)
    return path.open(mode, encoding=encoding)
