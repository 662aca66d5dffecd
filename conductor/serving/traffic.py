"""The traffic of the last hour as a trace, for "what if": when requests came, their lengths, their blocks.

A request is kept when it is over, as some hundred bytes: its arrival, tokens, priority, how it was served,
and the first eight bytes of each block's hash, which distinguish blocks well enough to simulate their cache.
All together take `MAX_BYTES` at most; where an hour has more the oldest go. No text and no token is kept.

`measured` is the report of how these requests were served, in the figures that replay reports of the very
same ones: how far the two are apart is the replay's error.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, NamedTuple

from base.clock import Clock
from base.distribution import distribution
from base.errors import CapacityError, RejectedError, SloUnreachableError
from base.request import FinishReason, RequestId, Slo
from conductor.placing.decisions import Actual, Decision
from conductor.placing.placement import PlacementRequest
from conductor.serving.dispatch import RequestObserver

KEPT_S = 3_600.0
MAX_BYTES = 16 << 20
OVERHEAD_BYTES = 64
"""Bytes that the interpreter takes for a record."""
KEY_BYTES = 8
MOST = (1 << 31) - 1
"""The largest number of a record: whoever asks for more is kept as asking for so much."""

SERVED, REJECTED, FAILED = range(3)
"""How a request ended; one whose client left counts as failed."""
ENDINGS = {reason.value: SERVED for reason in (FinishReason.STOP, FinishReason.LENGTH)} | {
    error.__name__: REJECTED for error in (RejectedError, SloUnreachableError, CapacityError)
}

_HEAD = struct.Struct("<dIIIiIfffB")
"""The numbers of a `PastRequest`, without padding."""


class PastRequest(NamedTuple):
    """The numbers of one request's record, which the first bytes of its blocks' hashes follow."""

    arrival_s: float
    num_tokens: int
    num_new_tokens: int
    """Tokens of the answer; 0: it was rejected, or failed before the first."""
    max_tokens: int
    priority: int
    num_cached_tokens: int = 0
    ttft_s: float = nan
    mean_tbt_s: float = nan
    """Mean seconds between two tokens; NaN, as of `ttft_s`: there were none."""
    compute_s: float = nan
    """Seconds in which a prefill node computed the prompt."""
    outcome: int = FAILED
    """One of SERVED, REJECTED and FAILED."""

    def pack(self) -> bytes:
        return _HEAD.pack(*self)

    @classmethod
    def unpack(cls, record: bytes) -> PastRequest:
        return cls(*_HEAD.unpack_from(record))


@dataclass(slots=True)
class _OpenRecord:
    """The record of a request in progress."""

    asked: PlacementRequest
    arrival_s: float
    actual: Actual | None = None
    """How the attempt went that brought the first token; None: none has."""
    num_attempts: int = 0


class Traffic(RequestObserver):
    """Keeps what was asked. Belongs to the event loop."""

    def __init__(self, clock: Clock, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._running: dict[str, _OpenRecord] = {}
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0

    def decided(self, made: Decision) -> None:
        name = made.asked.request_id.rpartition(".")[0]
        if name not in self._running:
            self._running[name] = _OpenRecord(made.asked, made.arrived_at_s)

    def ended(self, attempt_id: RequestId, actual: Actual) -> None:
        running = self._running.get(attempt_id.rpartition(".")[0])
        if running is None:
            return
        running.num_attempts += 1
        if running.actual is None and actual.ttft_s is not None:
            running.actual = actual

    def finished(self, request_id: RequestId, num_tokens: int, outcome: str, reason: str) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        now_s = self._clock.now_s()
        record = _record(running, num_tokens, ENDINGS.get(outcome, FAILED), now_s)
        self._kept.append(record)
        self._num_bytes += len(record) + OVERHEAD_BYTES
        since_s = now_s - KEPT_S
        while self._num_bytes > self._max_bytes or _HEAD.unpack_from(self._kept[0])[0] < since_s:
            self._num_bytes -= len(self._kept.popleft()) + OVERHEAD_BYTES

    def __len__(self) -> int:
        """Return the number of requests that are kept."""
        return len(self._kept)

    def records(self) -> list[bytes]:
        """Return what is kept, for `trace_lines`."""
        return list(self._kept)


def _record(running: _OpenRecord, num_tokens: int, outcome: int, now_s: float) -> bytes:
    """Return what is kept of a request that is over."""
    asked, arrival_s, actual = running.asked, running.arrival_s, running.actual
    num_cached_tokens, ttft_s, mean_tbt_s, compute_s = 0, nan, nan, nan
    if actual is not None and actual.ttft_s is not None:
        num_cached_tokens, ttft_s = min(actual.num_cached_tokens or 0, MOST), actual.ttft_s
        mean_tbt_s = nan if actual.mean_tbt_s is None else actual.mean_tbt_s
        compute_s = actual.compute_s or 0.0
    if running.num_attempts > 1 and num_tokens > 1:
        # an attempt knows its own tokens: of several the pauses between them count too
        mean_tbt_s = (now_s - arrival_s - ttft_s) / (num_tokens - 1)
    max_tokens, priority = min(asked.max_tokens, MOST), max(-MOST, min(asked.priority, MOST))
    numbers = PastRequest(
        arrival_s,
        asked.num_tokens,
        num_tokens,
        max_tokens,
        priority,
        num_cached_tokens,
        ttft_s,
        mean_tbt_s,
        compute_s,
        outcome,
    )
    return numbers.pack() + b"".join([key[:KEY_BYTES] for key in asked.chain if isinstance(key, bytes)])


def trace_lines(records: list[bytes], block_size: int) -> Iterator[str]:
    """Yield the lines of a trace in Mooncake's format, by arrival.

    What nobody generated has the mean of what was, where it was allowed so much.
    """
    by_arrival = sorted(
        ((PastRequest.unpack(record), record) for record in records), key=lambda pair: pair[0][:5]
    )
    made = [served.num_new_tokens for served, _ in by_arrival if served.num_new_tokens]
    mean = round(sum(made) / len(made)) if made else 1
    known: dict[object, int] = {}
    yield json.dumps({"block_size": block_size}) + "\n"
    for number, (served, record) in enumerate(by_arrival):
        keys = array("Q", record[_HEAD.size :])
        ids = [known.setdefault(key, len(known)) for key in keys]
        # the block that is not full is nobody else's, nor any of a prompt that had to be computed whole
        missing = range(len(ids), -(-served.num_tokens // block_size))
        ids += [known.setdefault((number, place), len(known)) for place in missing]
        row = {
            "timestamp": round(1e3 * (served.arrival_s - by_arrival[0][0].arrival_s), 3),
            "input_length": served.num_tokens,
            "output_length": served.num_new_tokens or min(mean, served.max_tokens),
            "hash_ids": ids,
        }
        yield json.dumps(row | ({"priority": served.priority} if served.priority else {})) + "\n"


def measured(records: Sequence[bytes], slo: Slo) -> dict[str, Any]:
    """Return how requests were served, under the names that a replay's report has for its own figures.

    Args:
        slo: The bounds that all are judged by, whatever each named: the trace holds none.
    """
    asked = [PastRequest.unpack(record) for record in records]
    served = [each for each in asked if each.outcome == SERVED]
    # an answer of one token has no TBT, and is within any bound on it
    good = sum(each.ttft_s <= slo.ttft_slo_s and not each.mean_tbt_s > slo.tbt_slo_s for each in served)
    return {
        "requests": len(asked),
        "completed": len(served),
        "rejected": sum(each.outcome == REJECTED for each in asked),
        "failed": sum(each.outcome == FAILED for each in asked),
        "ttft_s": distribution(array("d", [each.ttft_s for each in served])),
        "mean_tbt_s": distribution(array("d", [s for each in served if not isnan(s := each.mean_tbt_s)])),
        "served_within": good / len(asked),
        "hit_rate_tokens": sum(each.num_cached_tokens for each in served)
        / max(1, sum(each.num_tokens for each in served)),
        "prefill_gpu_s_per_request": distribution(array("d", [each.compute_s for each in served]))["mean"],
    }
