"""Outcomes: what became of each request of a run, and the figures made of it.

One column an attribute: a run of a million requests keeps a few tens of megabytes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from base.request import Slo
from conductor.placing.profile import Profile
from conductor.replay.segments import Segment
from conductor.replay.sim_request import SimRequest

# The paper's TBT of a request: the mean of its longest tenth of token gaps.
LONGEST_SHARE = 0.1


class Rejected(NamedTuple):
    """A request that was refused."""

    number: int
    arrival_s: float
    reason: str
    num_tokens: int
    """Tokens of its prompt."""
    output_tokens: int
    """Tokens that its answer would have had."""


class Outcomes:
    """Counts every request once: completed, or rejected with a reason."""

    def __init__(self, block_size: int, profile: Profile | None = None) -> None:
        """`profile`: every TTFT has its dispatch."""
        self._block_size = block_size
        self._dispatch_s = profile.dispatch_s if profile else 0.0
        self._dispatch_token_s = profile.dispatch_token_s if profile else 0.0
        self.num_arrived = 0
        self.named: dict[int, Slo] = {}
        """Bounds of the requests that name their own, by number; all others are judged by the run's."""
        self.refused: list[Rejected] = []
        self.wasted_prefill_s = 0.0
        self.replicas_created = 0
        self.num_retried = 0
        self.role_changes = 0
        self.number = array("q")
        self.arrival_s = array("d")
        self.ttft_s = array("d")
        self.tbt_s = array("d")
        self.num_tokens = array("q")
        self.output_tokens = array("q")
        self.prefix_tokens = array("q")
        self.prefill_s = array("d")
        self.queue_s = array("d")
        self.mean_tbt_s = array("d")
        self.prefill_node: list[str] = []
        self.decode_node: list[str] = []

    def rejected(self, request: SimRequest, reason: str, wasted_prefill_s: float) -> None:
        """A request was refused; `wasted_prefill_s` had been spent on it."""
        tokens = request.prompt_tokens, request.output_tokens
        self.refused.append(Rejected(request.number, request.arrival_s, reason, *tokens))
        self.wasted_prefill_s += wasted_prefill_s

    def completed(
        self, request: SimRequest, tbt_s: float, prefill_node: str, decode_node: str, now_s: float
    ) -> None:
        """A request had its last token at `now_s`."""
        arrival_s, first_token_s = request.arrival_s, request.first_token_s
        assert first_token_s is not None, "a request completes after its first token"
        prompt_tokens, prefix_tokens = request.prompt_tokens, request.prefix_tokens
        self.number.append(request.number)
        self.arrival_s.append(arrival_s)
        dispatch_s = self.dispatch_s(prompt_tokens)
        self.ttft_s.append(first_token_s - arrival_s + dispatch_s)
        self.tbt_s.append(tbt_s)
        self.num_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens := request.output_tokens)
        self.mean_tbt_s.append((now_s - first_token_s) / (output_tokens - 1) if output_tokens > 1 else 0.0)
        self.prefix_tokens.append(prefix_tokens if prefix_tokens < prompt_tokens else prompt_tokens)
        self.prefill_s.append(request.prefill_s)
        self.queue_s.append(request.started_at_s - arrival_s)
        self.prefill_node.append(prefill_node)
        self.decode_node.append(decode_node)

    def dispatch_s(self, prompt_tokens: int) -> float:
        """Return the seconds by which a client has its answer later than the nodes made it."""
        return self._dispatch_s + prompt_tokens * self._dispatch_token_s

    @property
    def num_completed(self) -> int:
        """Requests that had their last token."""
        return len(self.ttft_s)

    @property
    def num_rejected(self) -> int:
        """Requests that were refused, early or late."""
        return len(self.refused)

    @property
    def rejections(self) -> Counter[str]:
        """Requests refused, by reason."""
        return Counter(refused.reason for refused in self.refused)

    def hit_rate_tokens(self) -> float:
        """Return matched over all prompt tokens of completed requests."""
        return sum(self.prefix_tokens) / max(1, sum(self.num_tokens))

    def hit_rate_blocks(self) -> float:
        """Return matched over all prompt blocks of completed requests, partial ones counted whole."""
        size = self._block_size
        matched = sum(-(-tokens // size) for tokens in self.prefix_tokens)
        return matched / max(1, sum(-(-tokens // size) for tokens in self.num_tokens))

    def mean_prefill_s(self) -> float:
        """Return the seconds of prefill of a completed request."""
        return sum(self.prefill_s) / max(1, self.num_completed)

    def share_within(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the share of all requests that completed within both bounds: effective capacity."""
        return sum(self._within(ttft_slo_s, tbt_slo_s, self.tbt_s)) / max(1, self.num_arrived)

    def served_share_within(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the share of all requests within both bounds as the service counts goodput.

        There TBT is a request's mean, and not that of its longest tenth of gaps, as in the paper.
        """
        return sum(self._within(ttft_slo_s, tbt_slo_s, self.mean_tbt_s)) / max(1, self.num_arrived)

    def token_share_within(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the share of all tokens whose requests completed within both bounds, prompts and answers.

        Long requests are refused and late first: by requests a cluster looks better than by tokens.
        """
        good = self.tokens_within(ttft_slo_s, tbt_slo_s)
        refused = sum(each.num_tokens + each.output_tokens for each in self.refused)
        return good / max(1, sum(self.num_tokens) + sum(self.output_tokens) + refused)

    def tokens_within(self, ttft_slo_s: float, tbt_slo_s: float) -> int:
        """Return the tokens of prompts and answers whose requests completed within both bounds."""
        is_within = self._within(ttft_slo_s, tbt_slo_s, self.tbt_s)
        rows = zip(is_within, self.num_tokens, self.output_tokens, strict=True)
        return sum(prompt + output for is_good, prompt, output in rows if is_good)

    def refused_prompt_share(self) -> float:
        """Return the share of all prompt tokens that were of refused requests."""
        refused = sum(each.num_tokens for each in self.refused)
        return refused / max(1, refused + sum(self.num_tokens))

    def _within(self, ttft_slo_s: float, tbt_slo_s: float, tbt_s: Sequence[float]) -> list[bool]:
        """Return of each request whether it met its own bounds, or else these."""
        rows = zip(self.ttft_s, tbt_s, strict=True)
        if not self.named:
            return [ttft <= ttft_slo_s and tbt <= tbt_slo_s for ttft, tbt in rows]
        usual = Slo(ttft_slo_s, tbt_slo_s)
        bounds = [self.named.get(number, usual) for number in self.number]
        return [
            ttft <= slo.ttft_slo_s and tbt <= slo.tbt_slo_s
            for (ttft, tbt), slo in zip(rows, bounds, strict=True)
        ]


def worst_gaps_s(gaps: list[Segment], total: int) -> float:
    """Return the mean of the longest tenth of a request's `total` token gaps, sorting them; 0 without any."""
    if not total:
        return 0.0
    wanted = left = ceil(total * LONGEST_SHARE)
    seconds = 0.0
    gaps.sort(reverse=True)
    for last_s, steps, growth_s in gaps:
        taken = steps if steps < left else left
        # the last `taken` of an arithmetic progression
        seconds += taken * (last_s - growth_s * (taken - 1) / 2)
        left -= taken
        if not left:
            break
    return seconds / wanted
