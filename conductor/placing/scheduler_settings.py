"""What an operator may set of the scheduler: the `scheduler` section of cluster.yaml, as it decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from base.config import SchedulerConfig


class RejectPolicy(Enum):
    """When decode load is tested."""

    NONE = "none"
    LATE = "late"
    EARLY = "early"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What an operator may set."""

    reject: RejectPolicy = RejectPolicy.PREDICT
    fetches: bool = True
    """Whether a prefix may be fetched from another node; False is local cache-awareness."""
    kvcache_balancing_threshold: float | None = None
    """Fetch where best match / own match is at least this; None: the cost model decides."""
    inline_tokens: int = 0
    """What a decode node may compute of a prompt itself, where that is sooner and breaks nobody's
    TBT; 0: nothing, every prompt goes to a prefill node."""
    ttft_headroom: float = 1.0
    """A TTFT bound is kept for so much of it in the prediction: what is predicted is not exact."""
    ahead_s: float = inf
    """Place only where less than this is queued already, so that order is kept before the nodes;
    an idle node is always placed on. Infinity, and in replay: whatever is queued."""


DEFAULT_SETTINGS = SchedulerSettings()


def scheduler_settings(config: SchedulerConfig) -> SchedulerSettings:
    """Return the `scheduler` section of cluster.yaml as settings."""
    return SchedulerSettings(
        reject=RejectPolicy(config.reject),
        fetches=config.fetch,
        kvcache_balancing_threshold=config.kvcache_balancing_threshold or None,
        inline_tokens=config.inline_tokens,
        ttft_headroom=config.ttft_headroom,
        ahead_s=config.ahead_s,
    )
