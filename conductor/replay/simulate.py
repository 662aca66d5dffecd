"""One simulated run: a trace, how it arrives, and the cluster it meets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conductor.placing.cost_model import CostModel
from conductor.replay.cluster import Cluster, Watch
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.colocated import ColocatedCluster
from conductor.replay.sim_engine import DEFAULT_CHUNK_TOKENS
from conductor.replay.trace import Trace, TraceRequest, arrivals


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    trace: Trace
    cost: CostModel
    options: ClusterOptions
    speed: float = 1.0
    scale: int = 1
    jitter_s: float = 0.0
    limit: int | None = None


def simulate(plan: Plan, watch: Watch | None = None) -> Cluster:
    """Return the cluster after every request of the plan ended; `watch` is told how far it is."""
    cluster = Cluster(plan.cost, plan.options)
    cluster.outcomes.gaps = [] if plan.options.keep_gaps else None
    _run(lambda rows: cluster.run(rows, watch), plan)
    return cluster


def simulate_colocated(plan: Plan) -> ColocatedCluster:
    """As `simulate`, with as many colocated nodes as the plan has nodes in all."""
    options = plan.options
    num_nodes = options.prefill_nodes + options.decode_nodes
    chunk_tokens = options.chunk_tokens or DEFAULT_CHUNK_TOKENS
    cluster = ColocatedCluster(
        plan.cost, num_nodes, options.block_size, chunk_tokens, options.slo, options.reject
    )
    cluster.outcomes.gaps = [] if options.keep_gaps else None
    _run(cluster.run, plan)
    return cluster


def _run(run: Callable[[Iterator[TraceRequest]], None], plan: Plan) -> None:
    rows = arrivals(plan.trace, plan.speed, plan.scale, plan.jitter_s, plan.limit, plan.options.seed)
    # The run makes millions of objects and no cycles; looking for some takes time for
    # nothing.
    gc.freeze()
    gc.disable()
    try:
        run(rows)
    finally:
        gc.enable()
        gc.unfreeze()
