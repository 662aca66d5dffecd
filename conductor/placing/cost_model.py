"""Cost model: seconds of prefill, decode, transfer and load, predicted from a profile.

A profile (`profile.py`) is a dozen numbers of one kind of node running one model. The forms:

    prefill(n new, p prefix) = fixed + a n + b ((p+n)^2 - p^2) + c h / (n + h) + d p
    decode step(B, K)        = fixed + e B + f K + x (1 - (1 - s)^B)
    step with chunks         = `StepCost.with_chunks_s` (bench/results/replay.md)
    transfer(tokens)         = latency + tokens bytes / rate

`a` is the linear layers, `b` attention (of few new tokens another kernel's, as in a step with
chunks, so that somewhat more of them may take less), `c` what a small matrix multiplication wastes
(half of it at `h` new tokens), `d` the load of the prefix from host memory, `x` that of all
experts, of which `B` tokens hit a share (`base/step_cost.py`). For the paper's cluster they are
fitted to ten digitised points, five of them 95 % cached, within 4 % (uncached: 1.5 %); for an H200
to our own measurements. FAST'25 equation 1 has the terms in a and b alone.

A profile is never quite right on a live node (another processor, a noisy neighbour), so
`Corrections` learns each node's measured/predicted ratio, how it goes with size, and the seconds that
no profile knows of: messages, and the turn of each event loop.
The ratio is kept apart from the profile: replay then starts from the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import fields
from math import exp, log

from base.step_cost import StepCost, hit_share
from conductor.placing.profile import Profile

# One measurement moves the ratio by a tenth: one outlier (a page fault, a compile) does not send the next
# burst elsewhere. The first ten are averaged, so that a few forget a cold start.
CORRECTION_GAIN = 0.1

# What may be learned at once beyond four times what is known: a message there and back, twice.
MIN_ADDED_S = 0.02

# A link that hand-offs fill still gives a fetch something.
MIN_FETCH_SHARE = 0.05

# A ratio outside means the profile is for another machine; the prediction then stays
# within a factor that admission can live with until somebody profiles.
RATIO_LIMITS = (0.05, 20.0)
RATIO_DIGITS = 9

# How much a ratio may grow with each e-fold of the seconds predicted. Below 1 / e-fold either way, what is
# longer by the profile stays longer.
TREND_LIMIT = 0.5

# Sizes that hardly differ say nothing of a trend: variance of their logarithms at which it is half believed.
TREND_VARIANCE = 0.1

# A trend is followed to prompts of an eighth or eight times of what was seen, and is level beyond.
TREND_REACH = math.log(8.0)


class CostModel:
    """Predictions from one profile. Pure: the same question has the same answer."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.step = StepCost(*(getattr(profile, field.name) for field in fields(StepCost)))
        # read once: these are evaluated several times for each placement
        half = profile.prefill_small_tokens
        small = profile.prefill_small_s * half, half, profile.prefix_token_s
        self._prefill = profile.prefill_fixed_s, profile.prefill_token_s, profile.prefill_token2_s, *small
        self._long_tokens = profile.long_chunk_tokens if profile.chunk_token2_s else 0
        computed_bytes_per_s = profile.kv_token_bytes / profile.prefill_token_s
        self._handoff_share = computed_bytes_per_s / profile.transfer_bytes_per_s
        # floats: they are multiplied with floats
        self._num_layers, token_bytes = float(profile.num_layers), float(profile.kv_token_bytes)
        self._transfer = (profile.transfer_fixed_s, token_bytes, profile.transfer_bytes_per_s)
        self._decode = (profile.decode_fixed_s, profile.decode_sequence_s, profile.decode_context_token_s)
        self._experts_s, self._expert_share = profile.decode_experts_s, profile.expert_share
        self.chunk_part_s = self.step.chunk_part_s(1)
        """Seconds that a step has for any chunk, beside those who decode."""
        self._around_sequence_s = self.step.around_chunks_s(1, 0) - self.chunk_part_s
        self.empty_step_s = self.decode_step_s(0, 0)
        """Seconds of a step in which nothing decodes: what is there whoever joins."""

    def prefill_s(self, new_tokens: float, prefix_tokens: float) -> float:
        """Return the seconds to prefill `new_tokens` >= 1 after a prefix that is in host memory."""
        fixed, linear, square, small, half, load = self._prefill
        if self._long_tokens > new_tokens > 1:  # one is attended as a sequence that decodes
            square = self.step.attention_s(new_tokens, new_tokens)
        return (
            fixed
            + new_tokens * (linear + square * (new_tokens + 2 * prefix_tokens))
            + small / (new_tokens + half)
            + load * prefix_tokens
        )

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of one step of `batch` sequences with `context_tokens` in all."""
        fixed, sequence, token = self._decode
        step_s = fixed + sequence * batch + token * context_tokens
        if self._experts_s:
            step_s += self._experts_s * hit_share(self._expert_share, batch)
        return step_s

    def placed_step_s(self, sequences: float, context_tokens: float, places: float) -> float:
        """Return the seconds of a step where so many are to decode and `places` do at a time."""
        if sequences > places:
            sequences, context_tokens = places, context_tokens * places / sequences
        return self.decode_step_s(sequences, context_tokens)

    def placed_around_s(self, sequences: float, context_tokens: float, places: float) -> float:
        """Return the seconds of such a step with chunks of prompts, but for those of the chunks' tokens."""
        if sequences > places:
            sequences, context_tokens = places, context_tokens * places / sequences
        return self.chunk_part_s + self._around_sequence_s * sequences + self._decode[2] * context_tokens

    def gap_s(self, sequences: float, context_tokens: float, places: float) -> float:
        """Return the mean seconds of a token where so many are to decode and `places` do at a time.

        Who has no place waits for one, once: over its tokens that is as if all took turns.
        """
        if sequences <= places:
            return self.decode_step_s(sequences, context_tokens)
        return self.placed_step_s(sequences, context_tokens, places) * sequences / places

    def beside_chunks_s(self, new_tokens: int, prefix_tokens: int) -> float:
        """Return the seconds of a prompt that are in none of its chunks' steps.

        Where no steps were measured, whatever its prefill has that is not in proportion.
        """
        fixed, _, _, small, half, load = self._prefill
        load_s = load * prefix_tokens
        if self.profile.chunk_step_s:
            return load_s
        return load_s + fixed + small / (new_tokens + half)

    def transfer_s(self, tokens: int, share: float = 1.0) -> float:
        """Return the seconds to move the KV of `tokens` at `share` of a link; 0 tokens cost nothing."""
        if tokens <= 0:
            return 0.0
        fixed, token_bytes, bytes_per_s = self._transfer
        return fixed + tokens * token_bytes / (bytes_per_s * share)

    def fetch_share(self, is_prefilling: bool, num_fetches: int) -> float:
        """Return the share of a node's link that one more fetch from it would get.

        A node that prefills streams out KV as fast as it computes it; fetches share what
        that leaves, one more with those under way.
        """
        left = 1.0
        if is_prefilling:
            left = max(MIN_FETCH_SHARE, 1.0 - self._handoff_share)
        return left / (1 + num_fetches)

    def handoff_s(self, tokens: int, compute_s: float) -> float:
        """Return the seconds that a hand-off streamed by layer adds after the last layer computed.

        Each layer leaves while the next ones compute, so what shows is the last layer and
        whatever the link could not move during the others.
        """
        return self.shown_s(self.transfer_s(tokens), compute_s)

    def shown_s(self, whole_s: float, compute_s: float) -> float:
        """Return the seconds that show of a hand-off which takes `whole_s` on its link."""
        late_s = whole_s - compute_s * (self._num_layers - 1.0) / self._num_layers
        return (late_s if late_s > 0.0 else 0.0) + self.tail_s(whole_s)

    def tail_s(self, whole_s: float) -> float:
        """Return the seconds of the last layer of a hand-off: its bytes, and all of the link's latency."""
        fixed_s = self._transfer[0]
        return fixed_s + (whole_s - fixed_s) / self._num_layers

    def leaving_s(self, tokens: int, new_tokens: int, num_tokens: int) -> float:
        """Return the seconds in which `tokens` of a prompt leave after its last layer was computed.

        Long chunks leave layer by layer, and the link's latency passes while their step draws a token. A
        shorter chunk leaves when its step has ended, unless nobody measured which those are.

        Args:
            new_tokens: Of the prompt's `num_tokens`, those that are computed.
        """
        whole_s, long_tokens = self.transfer_s(tokens), self.profile.long_chunk_tokens
        if not long_tokens:
            return self.tail_s(whole_s)
        if new_tokens >= long_tokens and num_tokens >= 2 * long_tokens:
            return self.tail_s(whole_s) - self._transfer[0]
        return whole_s

    def disk_load_s(self, tokens: int) -> float:
        """Return the seconds to bring the KV of `tokens` up from disk; from memory is inside `prefill_s`."""
        if not self.profile.disk_bytes_per_s:
            return math.inf if tokens else 0.0
        return tokens * self.profile.kv_token_bytes / self.profile.disk_bytes_per_s


class LearnedTerm:
    """Fading means, for one node and term, of the logarithms of measured/predicted and of the predicted.

    What was measured may be doubted: then work of usual length or less goes by the doubt, and longer work by
    what was measured, until the next measurement says which of them is nearer.
    """

    __slots__ = (
        "covariance",
        "log_ratio",
        "measured_log",
        "measured_ratio",
        "number",
        "ratio",
        "trend",
        "usual_s",
        "variance",
    )

    def __init__(
        self, ratio: float, usual_s: float, trend: float = 0.0, measured_ratio: float | None = None
    ) -> None:
        """Begin with a ratio that is not doubted, unless another was measured."""
        self.ratio = ratio
        self.log_ratio = math.log(ratio)
        self.measured_ratio = measured_ratio or ratio
        self.measured_log = math.log(self.measured_ratio)
        self.usual_s = usual_s
        self.trend = trend
        self.variance = self.covariance = 0.0
        self.number = 0

    def observe(self, log_ratio: float, predicted_s: float) -> None:
        if abs(log_ratio - self.measured_log) <= abs(log_ratio - self.log_ratio):
            self.log_ratio = self.measured_log
        off_ratio, off_size = log_ratio - self.log_ratio, math.log(predicted_s / self.usual_s)
        self.number += 1
        self.log_ratio += max(CORRECTION_GAIN, 1 / self.number) * off_ratio
        self.measured_log = self.log_ratio
        self.ratio = self.measured_ratio = math.exp(self.log_ratio)
        self.usual_s *= math.exp(CORRECTION_GAIN * off_size)
        fade = 1 - CORRECTION_GAIN
        self.variance = fade * (self.variance + CORRECTION_GAIN * off_size * off_size)
        self.covariance = fade * (self.covariance + CORRECTION_GAIN * off_size * off_ratio)
        self.trend = _within(self.covariance / (self.variance + TREND_VARIANCE), TREND_LIMIT)

    def corrected_s(self, predicted_s: float) -> float:
        trend, ratio = self.trend, self.ratio if predicted_s <= self.usual_s else self.measured_ratio
        if not trend or predicted_s <= 0:
            return predicted_s * ratio
        off_size = log(predicted_s / self.usual_s)
        if off_size > TREND_REACH:
            off_size = TREND_REACH
        elif off_size < -TREND_REACH:
            off_size = -TREND_REACH
        return predicted_s * ratio * exp(trend * off_size)

    def approach(self, log_ratio: float) -> None:
        """Doubt half of what is off from `log_ratio`; the next measurement counts for half."""
        self.number = 1
        self.log_ratio = (self.log_ratio + log_ratio) / 2
        self.ratio = math.exp(self.log_ratio)

    def relax(self, factor: float) -> None:
        self.log_ratio *= factor
        self.measured_log *= factor
        self.ratio, self.measured_ratio = math.exp(self.log_ratio), math.exp(self.measured_log)
        self.covariance *= factor
        self.trend *= factor


UNKNOWN = LearnedTerm(1.0, 1.0)
"""Stands for a term of which nothing was measured."""


class NodeCorrections:
    """Measured over predicted seconds of one node, by term; its `NodeState` keeps them at hand."""

    __slots__ = ("added_s", "decode", "handoff", "has_added", "prefill")

    def __init__(self) -> None:
        self.prefill = self.handoff = self.decode = UNKNOWN
        self.added_s = 0.0
        """Seconds of a request that are in no term."""
        self.has_added = False


class Corrections:
    """Measured over predicted seconds, per node and term, learned while serving.

    Ratios are averaged as logarithms: twice too slow and twice too fast cancel. Where a profile is
    another machine's, short prompts and long ones are off by different ratios: the trend is learned too.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, NodeCorrections] = {}
        self._learned: dict[tuple[str, str], LearnedTerm] = {}
        self.changed: set[str] = set()
        """Nodes of which the pace of prefill or decode was learned anew; whoever takes it in empties it."""

    def of(self, node_id: str) -> NodeCorrections:
        """Return what is learned of a node, which goes on changing until the node is forgotten."""
        known = self._nodes.get(node_id)
        if known is None:
            known = self._nodes[node_id] = NodeCorrections()
        return known

    def observe(self, node_id: str, term: str, predicted_s: float, measured_s: float, count: int = 1) -> None:
        """Learn from one measurement, of `count` together. `predicted_s`: by the profile alone."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        low, high = RATIO_LIMITS
        # what is as predicted is exactly so: sums of floats would decide ties between nodes
        log_ratio = round(math.log(min(high, max(low, measured_s / predicted_s))), RATIO_DIGITS)
        known = self._learned.get((node_id, term))
        if known is None:
            known = self._know(node_id, term, LearnedTerm(math.exp(log_ratio), predicted_s / count))
        known.observe(log_ratio, predicted_s / count)
        self._note_changed(node_id, term)

    def ratio(self, node_id: str, term: str) -> float:
        """Return what to multiply a prediction with, of usual size; 1 before anything was measured."""
        return self._learned.get((node_id, term), UNKNOWN).ratio

    def ratios(self) -> dict[tuple[str, ...], float]:
        """Return all that is learned, by node and term."""
        return {key: known.ratio for key, known in self._learned.items()}

    def observe_added(self, node_id: str, measured_s: float) -> None:
        """Learn the seconds of a request that are in no term."""
        node = self.of(node_id)
        known, gain = node.added_s, CORRECTION_GAIN if node.has_added else 1.0
        # one stall of some seconds would otherwise be predicted for the next ten requests
        measured_s = min(measured_s, 4 * known + MIN_ADDED_S)
        node.added_s, node.has_added = known + gain * (measured_s - known), True

    def restore_added(self, node_id: str, seconds: float) -> None:
        """Make `seconds` exactly what is known of a node: for decisions made again."""
        node = self.of(node_id)
        node.added_s, node.has_added = seconds, True

    def restore(
        self,
        node_id: str,
        term: str,
        ratio: float,
        trend: float = 0.0,
        usual_s: float = 1.0,
        measured_ratio: float | None = None,
    ) -> None:
        """Make this exactly what is known of a node: for decisions made again."""
        self._know(node_id, term, LearnedTerm(ratio, usual_s, trend, measured_ratio))
        self._note_changed(node_id, term)

    def relax(self, factor: float) -> None:
        """Believe what was learned less: keep `factor` of it, as logarithms; 0 leaves the profile alone."""
        for (node_id, term), known in self._learned.items():
            known.relax(factor)
            self._note_changed(node_id, term)
        for node in self._nodes.values():
            node.added_s *= factor

    def doubt(self, node_id: str, other_id: str, term: str) -> None:
        """Believe half as much that a node is slower, by its profile, than another is by its own."""
        known, other = self._learned.get((node_id, term)), self._learned.get((other_id, term))
        if known is not None and other is not None and known.log_ratio > other.log_ratio:
            known.approach(other.log_ratio)
            self._note_changed(node_id, term)

    def _know(self, node_id: str, term: str, learned: LearnedTerm) -> LearnedTerm:
        setattr(self.of(node_id), term, learned)
        self._learned[node_id, term] = learned
        return learned

    def _note_changed(self, node_id: str, term: str) -> None:
        if term != "handoff":
            self.changed.add(node_id)

    def forget(self, node_id: str) -> None:
        """Drop what was learned of a node that left."""
        self._nodes.pop(node_id, None)
        for key in [key for key in self._learned if key[0] == node_id]:
            del self._learned[key]


def _within(number: float, limit: float) -> float:
    return min(limit, max(-limit, number))
