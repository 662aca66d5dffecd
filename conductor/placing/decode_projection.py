"""Decode projection: how many sequences will decode at a moment to come.

The question of the paper (arXiv 2407.00079, section 7.4), at the level of the whole system. There every
request decodes for one uniform time t_d. Here each is expected to survive as the requests that ended lately
did: of those whose prefill ends at s, a share S(t - s) decodes at t, where S is the share of the lengths seen
that were longer; and of those that decode already, S(t - s) / S(now - s), for they have come so far. One
time for all was weighed: the 99th percentile rejected a fifth of the requests for sequences that had ended by
then, and a shorter one let the pool overfill (simulation, Table 3 of the paper).

Lengths are of tokens, and become seconds by those that a token took lately. The former belong to who asks
and change slowly; the latter belong to the load and follow it within a dozen requests. Nobody survives the
most tokens that its request allows.

Starts are counted in buckets, of which the mean start is kept, so a question costs as many searches as
there are buckets with a request that has not ended, whatever the number of nodes and requests. Ages are not
rounded: in whole buckets a sequence of 1.7 s would count for two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

BUCKET_S = 0.5

# Enough for a tail, few enough to follow a change of traffic within minutes.
LENGTHS = 256
# The first to finish are the shortest, and say nothing of the others.
FEWEST_LENGTHS = 16
INITIAL_TOKENS = 1024.0

# One request moves the seconds of a token by so much; the first ones are averaged.
TOKEN_GAIN = 1 / 16

Bucket = list[float]
"""Sequences, their context in tokens, and sums of their starts in seconds and of the tokens they may have."""


class DecodeProjection:
    """Counts prefills by the moment they end, and how long sequences decode."""

    def __init__(self, initial_token_s: float) -> None:
        """`initial_token_s` is `token_s` of a projection that counts nobody."""
        self.num_sequences = self.num_tokens = 0
        """All that are counted, with their context: no moment has more of them."""
        self._buckets: dict[int, Bucket] = {}
        """Buckets with a sequence, under their moment divided by `BUCKET_S`."""
        self._seen: deque[int] = deque(maxlen=LENGTHS)
        """Lengths in tokens that were observed since somebody asked: most of the time nobody does."""
        self._recent: deque[int] = deque()
        self._ordered: list[float] = []
        self.token_s = initial_token_s
        """Seconds of a token: as its owner predicts them until a request has ended that says it."""
        self._num_timed = 0
        self._mean_tokens = INITIAL_TOKENS
        self._expected = [INITIAL_TOKENS]
        """Lengths in order, of which each is as likely."""

    def add(self, moment_s: float, tokens: int, max_tokens: int) -> None:
        """Expect a sequence of `tokens` context to start decoding up to `max_tokens` at `moment_s`."""
        self.num_sequences += 1
        self.num_tokens += tokens
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = [1, tokens, moment_s, max_tokens]
        else:
            bucket[0] += 1
            bucket[1] += tokens
            bucket[2] += moment_s
            bucket[3] += max_tokens

    def discard(self, moment_s: float, tokens: int, max_tokens: int) -> None:
        """Undo an `add` of the same values."""
        self.num_sequences -= 1
        self.num_tokens -= tokens
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets[key]
        bucket[0] -= 1
        bucket[1] -= tokens
        bucket[2] -= moment_s
        bucket[3] -= max_tokens
        if not bucket[0]:
            del self._buckets[key]

    def move(self, from_s: float, to_s: float, tokens: int, max_tokens: int) -> None:
        """Expect at `to_s` what was expected at `from_s`."""
        self.discard(from_s, tokens, max_tokens)
        self.add(to_s, tokens, max_tokens)

    def at(self, moment_s: float, now_s: float) -> tuple[float, float]:
        """Return (sequences, context tokens) expected to decode at `moment_s`, in all nodes."""
        self._take_in()
        expected, token_s = self._expected, self.token_s
        count = len(expected)
        sequences = tokens = 0.0
        for number, context, starts_s, allowed in self._buckets.values():
            start_s = starts_s / number
            if start_s > moment_s:
                continue
            length = (moment_s - start_s) / token_s
            share = 1.0 - bisect_right(expected, length) / count
            if start_s < now_s:
                alive = 1.0 - bisect_right(expected, (now_s - start_s) / token_s) / count
                # longer than any that was seen: nothing is known of its end
                share = share / alive if alive else 1.0
            if moment_s > now_s and length >= allowed / number:
                continue
            sequences += number * share
            tokens += context * share
        return sequences, tokens

    @property
    def is_timed(self) -> bool:
        """Whether a request has ended that says what a token takes."""
        return self._num_timed > 0

    @property
    def decode_s(self) -> float:
        """Mean seconds that a sequence decodes."""
        self._take_in()
        return self._mean_tokens * self.token_s

    def restore(self, decode_s: float) -> None:
        """Take over the mean seconds that another projection had, which counted the sequences."""
        self.token_s = decode_s / self._mean_tokens
        self._num_timed = 1

    def observe(self, decode_s: float, num_tokens: int) -> None:
        """Learn how long one request decoded, and how many tokens came after its first one."""
        self._seen.append(num_tokens)
        if num_tokens > 0 and decode_s > 0.0:
            self._num_timed += 1
            gain = max(TOKEN_GAIN, 1 / self._num_timed)
            self.token_s += gain * (decode_s / num_tokens - self.token_s)

    def _take_in(self) -> None:
        """Put in order what was observed."""
        if not self._seen:
            return
        recent, ordered = self._recent, self._ordered
        for num_tokens in self._seen:
            if len(recent) == LENGTHS:
                del ordered[bisect_left(ordered, recent.popleft())]
            recent.append(num_tokens)
            insort(ordered, num_tokens)
        self._seen.clear()
        if len(ordered) >= FEWEST_LENGTHS:
            self._mean_tokens = sum(ordered) / len(ordered)
            self._expected = ordered
