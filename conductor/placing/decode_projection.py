"""Decode projection: how many sequences will decode at a moment to come.

The question of the paper (arXiv 2407.00079, section 7.4), at the level of the whole system. There every
request decodes for one uniform time t_d. Here each is expected to survive as the requests that ended lately
did: of those whose prefill ends at s, a share S(t - s) decodes at t, where S is the share of the lengths seen
that were longer; and of those that decode already, S(t - s) / S(now - s), for they have come so far. One
time for all was weighed: the 99th percentile rejected a fifth of the requests for sequences that had ended by
then, and a shorter one let the pool overfill (simulation, Table 3 of the paper).

Lengths are of tokens, and become seconds by those that a token took lately. The former belong to who asks
and change slowly; the latter belong to the load and follow it within a dozen requests. What a request allows
is not looked at: replay's requests allow what they will have, clients mostly far more.

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

# What those before the last one count beside it, for the seconds of a token.
KEPT = 15 / 16

# One answer of so many is shorter than one that counts as short.
SHORT_OF = 50


class DecodeProjection:
    """Counts prefills by the moment they end, and how long sequences decode."""

    def __init__(self, initial_tokens: float, initial_token_s: float) -> None:
        """Begin without sequences.

        Args:
            initial_tokens: Length of each until requests have ended; a power of two, by which a mean is
                multiplied and divided without a change.
            initial_token_s: Seconds of a token until one has ended, or `predict` says another.
        """
        self.num_sequences = self.num_tokens = 0
        """All that are counted, with their context: no moment has more of them."""
        self._buckets: dict[int, list[float]] = {}
        """Moment in buckets to [sequences, tokens, sum of starts in seconds]; empty ones are absent."""
        self._seen: deque[int] = deque(maxlen=LENGTHS)
        """Lengths in tokens that were observed since somebody asked: most of the time nobody does."""
        self._recent: deque[int] = deque()
        self._ordered: list[float] = []
        self._mean_tokens = initial_tokens
        self._expected = [initial_tokens]
        """Lengths in order, of which each is as likely."""
        self._timed = (initial_tokens * initial_token_s, initial_tokens)
        """Fading sums of seconds and of tokens: where one came and where a thousand, a token is a token."""
        self._least_over_short = 1.0
        self.is_timed = False
        """Whether a request has ended that says what a token takes."""

    def add(self, moment_s: float, tokens: int) -> None:
        """Expect a sequence of `tokens` context to start decoding at `moment_s`."""
        self.num_sequences += 1
        self.num_tokens += tokens
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = [1, tokens, moment_s]
        else:
            bucket[0] += 1
            bucket[1] += tokens
            bucket[2] += moment_s

    def discard(self, moment_s: float, tokens: int) -> None:
        """Undo an `add` of the same values."""
        self.num_sequences -= 1
        self.num_tokens -= tokens
        key = int(moment_s / BUCKET_S)
        bucket = self._buckets[key]
        bucket[0] -= 1
        bucket[1] -= tokens
        bucket[2] -= moment_s
        if not bucket[0]:
            del self._buckets[key]

    def move(self, from_s: float, to_s: float, tokens: int) -> None:
        """Expect at `to_s` what was expected at `from_s`."""
        self.discard(from_s, tokens)
        self.add(to_s, tokens)

    def at(self, moment_s: float, now_s: float) -> tuple[float, float]:
        """Return (sequences, context tokens) expected to decode at `moment_s`, in all nodes."""
        self._take_in()
        expected, token_s = self._expected, self.token_s
        count = len(expected)
        sequences = tokens = 0.0
        for number, context, starts_s in self._buckets.values():
            start_s = starts_s / number
            if start_s > moment_s:
                continue
            share = 1.0 - bisect_right(expected, (moment_s - start_s) / token_s) / count
            if start_s < now_s:
                alive = 1.0 - bisect_right(expected, (now_s - start_s) / token_s) / count
                # longer than any that was seen: nothing is known of its end
                share = share / alive if alive else 1.0
            sequences += number * share
            tokens += context * share
        return sequences, tokens

    @property
    def token_s(self) -> float:
        """Seconds of a token, more than 0."""
        seconds, tokens = self._timed
        return seconds / tokens

    @property
    def decode_s(self) -> float:
        """Mean seconds that a sequence decodes; 0 where answers are of one token."""
        self._take_in()
        return self._mean_tokens * self.token_s

    @property
    def mean_over_short(self) -> float:
        """Tokens of an answer of mean length over those of a short one, at least 1.

        Answers of one token have no gap that could be too long, so none of them is the short one."""
        self._take_in()
        expected = self._expected
        first = bisect_right(expected, 0.0)
        short_tokens = expected[first + (len(expected) - first) // SHORT_OF] if first < len(expected) else 1.0
        return max(self._least_over_short, self._mean_tokens / max(1.0, short_tokens))

    def predict(self, token_s: float) -> None:
        """Take what a token is predicted to take: for one that is not timed."""
        tokens = self._timed[1]
        self._timed = (token_s * tokens, tokens)

    def restore(self, decode_s: float, mean_over_short: float = 1.0) -> None:
        """Have means that were recorded, before anything is observed."""
        self._timed = (decode_s, self._mean_tokens)
        self._least_over_short = mean_over_short
        self.is_timed = True

    def observe(self, decode_s: float, num_tokens: int) -> None:
        """Learn how long one request decoded, and how many tokens came after its first one."""
        self._seen.append(num_tokens)
        if num_tokens > 0 and decode_s > 0.0:
            seconds, tokens = self._timed
            self._timed = (KEPT * seconds + decode_s, KEPT * tokens + num_tokens)
            self.is_timed = True

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
