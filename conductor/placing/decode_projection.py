"""Decode projection: how many sequences will decode at a moment to come.

The rule of the paper (arXiv 2407.00079, section 7.4), at the level of the whole system:
every request decodes for one uniform time t_d, counted from the moment its prefill ends.
At moment t, then, exactly those decode whose prefill ended within (t - t_d, t]: those
still in prefill come in, those decoding now go out. The paper leaves t_d open; here it is
the tail of the decode times seen, because a t_d below the tail lets the pool overfill
and was measured to be worse than no prediction (simulation.md, E8).

Moments are counted in buckets, so a question costs as many additions as there are buckets with a
request that has not ended, whatever the number of nodes and requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

BUCKET_S = 0.5

# Enough for a tail, few enough to follow a change of traffic within minutes.
DECODE_TIMES = 256
# The first to finish are the shortest, and say nothing of the tail.
FEWEST_TIMES = 16
# Of 0.6, 0.8, 0.9, 0.95 and 0.99 the last rejected least at the highest goodput (replay
# of the conversation trace at 2x, 10P2D).
TAIL = 0.99


class DecodeProjection:
    """Counts prefills by the moment they end, and estimates t_d."""

    def __init__(self, initial_decode_s: float) -> None:
        """`initial_decode_s` is t_d until requests have finished."""
        self.decode_s = initial_decode_s
        self._buckets: dict[int, list[int]] = {}
        """Moment in buckets to [sequences, tokens]; empty ones are absent."""
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, moment_s: float, tokens: int) -> None:
        """Expect a sequence of `tokens` context to start decoding at `moment_s`."""
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = [1, tokens]
        else:
            bucket[0] += 1
            bucket[1] += tokens

    def discard(self, moment_s: float, tokens: int) -> None:
        """Undo an `add` of the same values."""
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets[key]
        bucket[0] -= 1
        bucket[1] -= tokens
        if not bucket[0]:
            del self._buckets[key]

    def move(self, from_s: float, to_s: float, tokens: int) -> None:
        """Expect at `to_s` what was expected at `from_s`."""
        if int(from_s / BUCKET_S) != int(to_s / BUCKET_S):
            self.discard(from_s, tokens)
            self.add(to_s, tokens)

    def at(self, moment_s: float) -> tuple[int, int]:
        """Return (sequences, context tokens) expected to decode at `moment_s`, in all nodes."""
        first, last = int((moment_s - self.decode_s) / BUCKET_S) + 1, int(moment_s / BUCKET_S)
        sequences = tokens = 0
        for key, bucket in self._buckets.items():
            if first <= key <= last:
                sequences += bucket[0]
                tokens += bucket[1]
        return sequences, tokens

    def observe(self, decode_s: float) -> None:
        """Learn how long one request decoded."""
        recent, ordered = self._recent, self._ordered
        if len(recent) == DECODE_TIMES:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(decode_s)
        insort(ordered, decode_s)
        if len(ordered) >= FEWEST_TIMES:
            self.decode_s = ordered[int(TAIL * (len(ordered) - 1))]
