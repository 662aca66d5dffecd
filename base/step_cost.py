"""Seconds of one step of an engine, predicted: the closed form that nodes, placement and replay share.

    decode step(B, K)      = fixed + e B + f K + x (1 - (1 - s)^B)
    step with chunks       = a (n + B, padded) + b attended + g + h B + f K

B sequences decode with K tokens of context in all; n tokens of prompts are computed, and attended is m (m + 2
p) summed over their chunks of m tokens after p. Where tokens go to experts, x is the seconds in which all of
them are read, and one token hits a share s of them. The numbers are a profile's
(`conductor/placing/profile.py`), which a conductor sends to each node that attaches: what a step will take
has to be known before the first one like it has run, which no node could fit from the steps that it happened
to have. What a node can fit is how far all of them are off there, and it does (`StepCorrection`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import pairwise

from base.errors import ProtocolError

MAX_STEP_TOKENS = 256
"""Lengths that steps may be padded to, at most."""

GAIN = 0.1
"""One step moves what is learned by a tenth."""

OBSERVED_STEPS = 8
"""One step without chunks in so many is compared with its prediction."""

KNOWN_STEPS = 4
"""Steps of one kind that were compared, from which its correction is relied on."""

OUTLIER = math.log(2.0)

LAUNCH_S = 0.004
LAUNCH_SHARE = 0.1
"""Seconds, and share of a step, that are left of it at least when the next one is planned.

Planning and launching take 1 to 3 ms, and predictions of single steps are off by a tenth."""

RATIO_LIMITS = (0.05, 20.0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The part of a profile that steps take their seconds from; `Profile` says what each number is."""

    prefill_token_s: float
    prefill_token2_s: float
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    chunk_step_s: float = 0.0
    mixed_step_s: float = 0.0
    chunk_sequence_s: float = 0.0
    chunk_token2_s: float = 0.0
    attention_rows: int = 1
    long_chunk_tokens: int = 0
    step_tokens: tuple[int, ...] = ()
    decode_experts_s: float = 0.0
    expert_share: float = 0.0

    def check(self) -> None:
        """Raise ProtocolError for what no profile has."""
        for field in fields(self):
            if field.name != "step_tokens" and not 0 <= (value := getattr(self, field.name)) < math.inf:
                raise ProtocolError(f"step_cost.{field.name}: finite and not negative, not {value}")
        if not (self.prefill_token_s and self.decode_fixed_s and self.attention_rows):
            raise ProtocolError(
                "step_cost: prefill_token_s, decode_fixed_s and attention_rows are more than 0"
            )
        if self.expert_share > 1:
            raise ProtocolError(f"step_cost.expert_share: at most 1, not {self.expert_share}")
        lengths = self.step_tokens
        if len(lengths) > MAX_STEP_TOKENS or any(a >= b for a, b in pairwise(lengths)):
            raise ProtocolError(f"step_cost.step_tokens: at most {MAX_STEP_TOKENS} lengths, rising")

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of a step in which `batch` sequences decode, with so much context in all."""
        return (
            self.decode_fixed_s
            + self.decode_sequence_s * batch
            + self.decode_context_token_s * context_tokens
            + self.decode_experts_s * hit_share(self.expert_share, batch)
        )

    def chunk_part_s(self, batch: float) -> float:
        """Return the seconds that a step has for any chunk, however short, before its tokens are counted."""
        if not self.chunk_step_s:
            return 0.0
        return self.chunk_step_s + (self.mixed_step_s if batch else 0.0)

    def around_chunks_s(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of a step with chunks beside a batch, but for those of the chunks' tokens."""
        sequence_s = self.decode_sequence_s
        if self.chunk_step_s:
            sequence_s = self.chunk_sequence_s + self.prefill_token_s
        beside_s = sequence_s * batch + self.decode_context_token_s * context_tokens
        return self.chunk_part_s(batch) + beside_s

    def with_chunks_s(self, new_tokens: int, attended: float, batch: int, context_tokens: float) -> float:
        """Return the seconds of a step with chunks of `new_tokens` > 0 in all, beside a batch."""
        square, sequence_s = self.prefill_token2_s, self.decode_sequence_s
        rows, chunk_s = new_tokens, self.chunk_part_s(batch)
        if self.chunk_step_s:
            rows += batch
            square = self.attention_s(new_tokens, rows)
            rows = self.padded_rows(rows)
            sequence_s = self.chunk_sequence_s
        beside_s = sequence_s * batch + self.decode_context_token_s * context_tokens
        chunk_s += rows * self.prefill_token_s + attended * square + beside_s
        # of few tokens, what reads the weights is as long as where nothing but decoding does
        read_s = self.decode_fixed_s + self.decode_experts_s * hit_share(
            self.expert_share, new_tokens + batch
        )
        return max(chunk_s, read_s + beside_s)

    def padded_rows(self, rows: int) -> int:
        """Return the rows that a step with chunks has, where so many are wanted."""
        lengths = self.step_tokens
        at = bisect_left(lengths, rows)
        return lengths[at] if at < len(lengths) else rows

    def attention_s(self, new_tokens: float, rows: float) -> float:
        """Return the seconds of each token attended to in a step with chunks.

        Args:
            new_tokens: Of all its chunks.
            rows: Of the step, sequences that decode included.
        """
        if rows >= self.long_chunk_tokens:
            return self.prefill_token2_s
        at_once = self.attention_rows
        return self.chunk_token2_s * (-(-new_tokens // at_once) * at_once / new_tokens)


def attended_by(tokens: int, prefix: int) -> float:
    """Return what a chunk of so many tokens after a prefix attends to, as `with_chunks_s` counts it."""
    return tokens * (tokens + 2.0 * prefix)


def hit_share(expert_share: float, num_tokens: float) -> float:
    """Return the share of a layer's experts that so many tokens go to, each to `expert_share` of them."""
    return 1.0 - (1.0 - expert_share) ** num_tokens if expert_share else 0.0


class StepCorrection:
    """Measured over predicted seconds of a node's steps: with chunks and without, each in a fading mean.

    Means of logarithms: twice too slow and twice too fast cancel. One step counts as off by OUTLIER at most:
    what compiles, or waits for memory, is no measure of what follows.
    """

    __slots__ = ("_logs", "_seen")

    def __init__(self) -> None:
        self._logs = [0.0, 0.0]
        self._seen = [0, 0]

    def observe(self, has_chunks: bool, predicted_s: float, measured_s: float, steps: int = 1) -> None:
        """Learn from one step, or from several alike. Seconds that are not more than 0 say nothing."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        low, high = RATIO_LIMITS
        log_ratio = math.log(min(high, max(low, measured_s / predicted_s)))
        known, seen = self._logs[has_chunks], self._seen[has_chunks]
        for number in range(seen + 1, seen + steps + 1):
            known += max(GAIN, 1 / number) * min(OUTLIER, max(-OUTLIER, log_ratio - known))
        self._logs[has_chunks], self._seen[has_chunks] = known, seen + steps

    def ratio(self, has_chunks: bool) -> float:
        """Return what to multiply a prediction with: the other kind's, until there was one of this kind."""
        at = has_chunks if self._seen[has_chunks] else not has_chunks
        return math.exp(self._logs[at])

    def planned_after_s(self, has_chunks: bool, predicted_s: float, launch_s: float = LAUNCH_S) -> float:
        """Return the seconds after a step's beginning at which an engine that launches ahead plans the next.

        Who comes sooner is in that one. A device that ends a step before the next is launched waits for it:
        where little is known of a kind of steps, that is planned at once.

        Args:
            predicted_s: Seconds that the profile says to the step.
            launch_s: Seconds that are left for planning and launching.
        """
        if self._seen[has_chunks] < KNOWN_STEPS:
            return 0.0
        return max(0.0, predicted_s * self.ratio(has_chunks) * (1.0 - LAUNCH_SHARE) - launch_s)
