"""One simulated run: a trace, how it arrives, and the cluster it meets."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from conductor.placing.cost_model import CostModel
from conductor.replay.cluster import SimCluster, Watch
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.trace import Trace, arrivals


@dataclass(frozen=True, slots=True)
class Plan:
    """A trace, how it arrives, and the cluster that serves it."""

    trace: Trace
    cost: CostModel
    options: ClusterOptions
    speed: float = 1.0
    scale: int = 1
    jitter_s: float = 0.0
    limit: int | None = None
    session_rate: float | None = None
    """Sessions that begin a second, whatever the trace's times; None: those."""
    sessions: int | None = None
    """Sessions at a time, in a closed loop; None: they come when they come."""


def simulate(plan: Plan, watch: Watch | None = None) -> SimCluster:
    """Return the cluster after every request of the plan ended; `watch` sees how far it is."""
    cluster = SimCluster(plan.cost, plan.options)
    rows = arrivals(
        plan.trace,
        plan.speed,
        plan.scale,
        plan.jitter_s,
        plan.limit,
        plan.options.seed,
        plan.session_rate,
    )
    # The run makes millions of objects and no cycles; looking for some takes time for
    # nothing.
    gc.disable()
    try:
        cluster.run(rows, watch, plan.sessions)
    finally:
        gc.enable()
    return cluster
