"""The traffic of the last hour as a trace, for "what if": when requests came, their lengths, their blocks.

A request is kept when it is over, as some hundred bytes: its arrival, tokens, priority, and the first eight
bytes of each block's hash, which tell blocks apart well enough to simulate their cache. All together take
`MAX_BYTES` at most; where an hour has more the oldest go. No text and no token is kept.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import deque
from collections.abc import Iterator

from base.clock import Clock
from base.request import RequestId
from conductor.placing.decisions import Decision
from conductor.serving.dispatch import RequestObserver

KEPT_S = 3_600.0
MAX_BYTES = 16 << 20
OVERHEAD_BYTES = 64
"""Bytes that the interpreter takes for a record."""
KEY_BYTES = 8
MOST = (1 << 31) - 1
"""The largest number of a record: whoever asks for more is kept as asking for so much."""

_HEAD = struct.Struct("<dIIIi")
"""Arrival, prompt tokens, new tokens (0: rejected or failed), the most that were asked for, priority."""


class Traffic(RequestObserver):
    """Keeps what was asked. Belongs to the event loop."""

    def __init__(self, clock: Clock, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._begun: dict[str, bytes] = {}
        """The records of requests in progress, without their new tokens."""
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0

    def decided(self, made: Decision) -> None:
        asked = made.asked
        name = asked.request_id.rpartition(".")[0]
        if name not in self._begun:
            max_tokens, priority = min(asked.max_tokens, MOST), max(-MOST, min(asked.priority, MOST))
            head = _HEAD.pack(made.arrived_at_s, asked.num_tokens, 0, max_tokens, priority)
            keys = [key[:KEY_BYTES] for key in asked.chain if isinstance(key, bytes)]
            self._begun[name] = head + b"".join(keys)

    def finished(self, request_id: RequestId, num_tokens: int, outcome: str, reason: str) -> None:
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        arrived_at_s, num_prompt_tokens, _, max_tokens, priority = _HEAD.unpack_from(begun)
        head = _HEAD.pack(arrived_at_s, num_prompt_tokens, num_tokens, max_tokens, priority)
        record = head + begun[_HEAD.size :]
        self._kept.append(record)
        self._num_bytes += len(record) + OVERHEAD_BYTES
        since_s = self._clock.now_s() - KEPT_S
        while self._num_bytes > self._max_bytes or _HEAD.unpack_from(self._kept[0])[0] < since_s:
            self._num_bytes -= len(self._kept.popleft()) + OVERHEAD_BYTES

    def __len__(self) -> int:
        """Return the number of requests that are kept."""
        return len(self._kept)

    def records(self) -> list[bytes]:
        """Return what is kept, for `trace_lines`."""
        return list(self._kept)


def trace_lines(records: list[bytes], block_size: int) -> Iterator[str]:
    """Yield the lines of a trace in Mooncake's format, by arrival.

    What nobody generated has the mean of what was, where it was allowed so much.
    """
    heads = sorted((_HEAD.unpack_from(record), record) for record in records)
    made = [head[2] for head, _ in heads if head[2]]
    mean = round(sum(made) / len(made)) if made else 1
    known: dict[int, int] = {}
    yield json.dumps({"block_size": block_size}) + "\n"
    for number, ((arrival_s, num_tokens, num_new, max_tokens, priority), record) in enumerate(heads):
        keys = array("Q", record[_HEAD.size :])
        ids = [known.setdefault(key, len(known)) for key in keys]
        if num_tokens % block_size:
            # the block that is not full is nobody else's
            ids.append(known.setdefault(-1 - number, len(known)))
        row = {
            "timestamp": round(1e3 * (arrival_s - heads[0][0][0]), 3),
            "input_length": num_tokens,
            "output_length": num_new or max(1, min(mean, max_tokens)),
            "hash_ids": ids,
        }
        yield json.dumps(row | ({"priority": priority} if priority else {})) + "\n"
