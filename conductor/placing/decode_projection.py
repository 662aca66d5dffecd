"""Decode projection: how many sequences will decode at a moment to come.

The question of the paper (arXiv 2407.00079, section 7.4), at the level of the whole system. There every
request decodes for one uniform time t_d. Here each is expected to survive as the requests that ended lately
did: of those whose prefill ends at s, a share S(t - s) decodes at t, where S is the share of the decode times
seen that were longer; and of those that decode already, S(t - s) / S(now - s), for they have come so far. One
time for all was weighed: the 99th percentile rejected a fifth of the requests for sequences that had ended by
then, and a shorter one let the pool overfill (simulation, Table 3 of the paper).

Moments are counted in buckets, so a question costs as many additions as there are buckets with a
request that has not ended, whatever the number of nodes and requests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

BUCKET_S = 0.5

# Enough for a tail, few enough to follow a change of traffic within minutes.
DECODE_TIMES = 256
# The first to finish are the shortest, and say nothing of the others.
FEWEST_TIMES = 16
# Decode times seen between two changes of what is expected.
LEARN_EVERY = 8


class DecodeProjection:
    """Counts prefills by the moment they end, and how long sequences decode."""

    def __init__(self, initial_decode_s: float) -> None:
        """`initial_decode_s` is how long each decodes until requests have finished."""
        self.decode_s = initial_decode_s
        """Mean seconds that a sequence decodes."""
        self._buckets: dict[int, list[int]] = {}
        """Moment in buckets to [sequences, tokens]; empty ones are absent."""
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        self._survivors = [1.0] * max(1, round(initial_decode_s / BUCKET_S))
        """Share that decodes for more than so many buckets; past the end nobody does."""
        self._learned: list[float] = []
        """Decode times in order that `_survivors` does not say yet: who rejects nobody never asks."""
        self._num_new = 0

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

    def at(self, moment_s: float, now_s: float) -> tuple[float, float]:
        """Return (sequences, context tokens) expected to decode at `moment_s`, in all nodes."""
        if self._learned:
            self._survivors = survivors_of(self._learned)
            self._learned = []
        survivors = self._survivors
        end, then, now = len(survivors), int(moment_s / BUCKET_S), int(now_s / BUCKET_S)
        sequences = tokens = 0.0
        for key, (number, context) in self._buckets.items():
            age = then - key
            if age < 0:
                continue
            if age <= 0 or key >= now:
                share = survivors[age] if age < end else 0.0
            elif now - key < end:
                share = survivors[age] / survivors[now - key] if age < end else 0.0
            else:
                share = 1.0  # longer than any that was seen: nothing is known of its end
            sequences += number * share
            tokens += context * share
        return sequences, tokens

    def observe(self, decode_s: float) -> None:
        """Learn how long one request decoded."""
        recent, ordered = self._recent, self._ordered
        if len(recent) == DECODE_TIMES:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(decode_s)
        insort(ordered, decode_s)
        self._num_new += 1
        if len(ordered) >= FEWEST_TIMES and self._num_new >= LEARN_EVERY:
            self._num_new = 0
            self.decode_s = sum(ordered) / len(ordered)
            self._learned = ordered.copy()


def survivors_of(ordered: list[float]) -> list[float]:
    """Return the share of some decode times, in order, that are longer than so many buckets."""
    count = len(ordered)
    survivors = [
        1.0 - bisect_right(ordered, bucket * BUCKET_S) / count
        for bucket in range(int(ordered[-1] / BUCKET_S) + 1)
    ]
    # those that end within the bucket they began in were there for a part of it
    survivors[0] = 1.0
    return survivors
