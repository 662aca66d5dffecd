"""What a cluster's nodes did between two moments, from their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from base.metrics import samples_of
from bench.local_cluster import LocalCluster

STEPS = ("prefill_step_seconds_sum", "decode_step_seconds_sum")


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Since the nodes began."""

    step_s: Mapping[str, float]
    """In steps, by node."""
    exposed_transfer_s: float
    """Of hand-offs, that nothing hid."""
    num_prefills: float
    computed_tokens: float
    """Of prompts."""


def node_counts(cluster: LocalCluster) -> NodeCounts:
    """Ask all nodes; raises ApiError."""
    step_s: dict[str, float] = defaultdict(float)
    exposed_s = num_prefills = computed = 0.0
    for node, text in cluster.metrics().items():
        for name, labels, value in samples_of(text):
            if name in STEPS:
                step_s[node] += value
            elif name == "prefill_exposed_seconds_sum" and labels["what"] == "transfer":
                exposed_s += value
            elif name == "prefill_exposed_seconds_count" and labels["what"] == "transfer":
                num_prefills += value
            elif name == "prefill_tokens_total" and labels["source"] == "computed":
                computed += value
    return NodeCounts(step_s, exposed_s, num_prefills, computed)


def figures_between(before: NodeCounts, after: NodeCounts, load: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the nodes did of a load whose figures are given.

    `busy_share` is, for each pool, the mean share of its time that a node was in a step;
    `wasted_prefill_share` what was computed beyond the prompts that were answered, of all that was.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    for node, step_s in after.step_s.items():
        pool = node.rpartition("-")[0]
        shares[pool].append((step_s - before.step_s.get(node, 0.0)) / load["duration"])
    computed = after.computed_tokens - before.computed_tokens
    needed = load["total_input_tokens"] - load["cached_input_tokens"]
    num_prefills = after.num_prefills - before.num_prefills
    exposed_s = after.exposed_transfer_s - before.exposed_transfer_s
    return {
        "busy_share": {pool: fmean(values) for pool, values in sorted(shares.items())},
        "hit_rate": load["cached_input_tokens"] / max(1, load["total_input_tokens"]),
        "exposed_transfer_ms": 1e3 * exposed_s / max(1.0, num_prefills),
        "wasted_prefill_share": max(0.0, 1 - needed / computed) if computed else 0.0,
    }
