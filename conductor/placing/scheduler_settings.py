"""Settings of the scheduler: the `scheduler` section of cluster.yaml, as it decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf


class RejectPolicy(Enum):
    """When decode load is tested."""

    NONE = "none"
    LATE = "late"
    EARLY = "early"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """An operator's wishes, beside the view and the cost model."""

    reject: RejectPolicy = RejectPolicy.PREDICT
    fetches: bool = True
    """Whether a prefix may be fetched from another node; False is local cache-awareness."""
    kvcache_balancing_threshold: float | None = None
    """Fetch where best match / own match is at least this; None: the cost model decides."""
    roles_follow: bool = False
    """Whether a node's role is what it prefers. Then a decode node computes a prompt where that is sooner, a
    prefill node decodes where the decode pool cannot, and roles change with the load."""
    ttft_headroom: float = 1.0
    """A TTFT bound is kept for so much of it in the prediction: what is predicted is not exact."""
    ahead_s: float = inf
    """Place only where less than this is queued already, so that order is kept before the nodes;
    an idle node is always placed on. Infinity: whatever is queued."""
    policy: str = "global"
    """The name of the rule that chooses the prefill node, one of `prefill_policies.POLICIES`."""


DEFAULT_SETTINGS = SchedulerSettings()
