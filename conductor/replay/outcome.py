"""Outcomes: what became of each request of a run, and the figures made of it.

One column an attribute: a run of a million requests keeps a few tens of megabytes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from math import ceil

Segment = tuple[float, int, float]
"""Token gaps that grow evenly: (seconds of the last and longest, gaps, growth of each next)."""

# The paper's TBT of a request: the mean of its longest tenth of token gaps.
LONGEST_SHARE = 0.1


class Outcomes:
    """Counts every request once: completed, or rejected with a reason."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.num_arrived = 0
        self.rejections: Counter[str] = Counter()
        self.wasted_prefill_s = 0.0
        self.replicas_created = 0
        self.num_retried = 0
        self.role_changes = 0
        self.arrival_s = array("d")
        self.ttft_s = array("d")
        self.tbt_s = array("d")
        self.num_tokens = array("q")
        self.prefix_tokens = array("q")
        self.prefill_s = array("d")
        self.queue_s = array("d")

    def arrived(self) -> None:
        """A request came."""
        self.num_arrived += 1

    def rejected(self, reason: str, wasted_prefill_s: float) -> None:
        """A request was refused; `wasted_prefill_s` had been spent on it."""
        self.rejections[reason] += 1
        self.wasted_prefill_s += wasted_prefill_s

    def completed(
        self,
        *,
        arrival_s: float,
        ttft_s: float,
        tbt_s: float,
        num_tokens: int,
        prefix_tokens: int,
        prefill_s: float,
        queue_s: float,
    ) -> None:
        """A request had its last token."""
        self.arrival_s.append(arrival_s)
        self.ttft_s.append(ttft_s)
        self.tbt_s.append(tbt_s)
        self.num_tokens.append(num_tokens)
        self.prefix_tokens.append(prefix_tokens)
        self.prefill_s.append(prefill_s)
        self.queue_s.append(queue_s)

    @property
    def num_completed(self) -> int:
        """Requests that had their last token."""
        return len(self.ttft_s)

    @property
    def num_rejected(self) -> int:
        """Requests that were refused, early or late."""
        return self.rejections.total()

    def hit_rate_tokens(self) -> float:
        """Return matched over all prompt tokens of completed requests."""
        return sum(self.prefix_tokens) / max(1, sum(self.num_tokens))

    def hit_rate_blocks(self) -> float:
        """Return matched over all prompt blocks of completed requests, partial ones counted whole."""
        size = self._block_size
        matched = sum(-(-tokens // size) for tokens in self.prefix_tokens)
        return matched / max(1, sum(-(-tokens // size) for tokens in self.num_tokens))

    def share_within(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the share of all requests that completed within both bounds: effective capacity."""
        good = sum(
            ttft <= ttft_slo_s and tbt <= tbt_slo_s for ttft, tbt in zip(self.ttft_s, self.tbt_s, strict=True)
        )
        return good / max(1, self.num_arrived)


def distribution(values: array[float]) -> dict[str, float]:
    """Return mean and percentiles (nearest rank), zeros where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    last = len(ordered) - 1
    ranks = {
        name: ordered[round(share * last)] for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {"mean": sum(ordered) / len(ordered), **ranks}


def worst_gaps_s(gaps: list[Segment]) -> float:
    """Return the mean of the longest tenth of a request's token gaps, sorting them; 0 without any."""
    total = sum([gap[1] for gap in gaps])
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
