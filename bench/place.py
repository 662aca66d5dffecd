"""Seconds of one placement and of one index update, on clusters of 8 to 500 prefill nodes.

    python -m bench.place TRACE [--sizes 8,64,500] [--out results.json]

Every size runs the trace (copied as often as there are nodes for it) through replay with
`scheduler.place` timed from outside: queues, caches and index are those of a serving
cluster, not of an empty one. It runs with the settings of the papers (`cluster_options.PLAIN`)
and with those that the service ships with: roles follow the load, steps have budgets, a copy
has its price, predictions are corrected, and each request names replay's usual bounds.
Seconds are the thread's own on the processor, so that a busy machine's other work counts
only by the caches it spoils. Sizes and settings take turns over several rounds, because the
machine's speed drifts: ratios between them mean more than the microseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from base.config import EngineConfig, SchedulerConfig
from bench.about_run import about_run, write_result
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest, Rejection
from conductor.placing.prefill_policies import PrefillPolicy, scheduler_settings
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.profiles.reader import load_profile
from conductor.replay.arguments import DEFAULT_SLO
from conductor.replay.cluster import SimCluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.trace import Trace, arrivals
from conductor.replay.trace_formats import read_trace
from kvstore.index import PrefixIndex

NODES_PER_COPY = 8
"""Prefill nodes that one copy of the conversation trace keeps busy."""


class TimedPlace:
    """`place`, with the seconds of each call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(
        self,
        request: PlacementRequest,
        view: ClusterView,
        cost: CostModel,
        now_s: float,
        settings: SchedulerSettings,
        choose: PrefillPolicy,
    ) -> Placement | Rejection:
        started_s = time.thread_time()
        result = place(request, view, cost, now_s, settings, choose)
        self.seconds.append(time.thread_time() - started_s)
        return result


def plain(nodes: int, block_size: int) -> ClusterOptions:
    """Return a cluster of so many prefill nodes and decode nodes, as the papers have it."""
    return ClusterOptions(nodes, nodes, block_size)


def shipped(nodes: int, block_size: int) -> ClusterOptions:
    """Return the same cluster as the service ships, whose requests name bounds."""
    service = SchedulerConfig()
    return ClusterOptions(
        nodes,
        nodes,
        block_size,
        settings=scheduler_settings(service),
        learns=True,
        max_waiting=service.max_waiting,
        max_batch=EngineConfig().sequences(on_gpu=True),
        patience_s=service.patience_s,
        slo=DEFAULT_SLO,
    )


CLUSTERS = {"plain": plain, "shipped": shipped}


def measure_place(trace: Trace, options: ClusterOptions, requests: int) -> dict[str, float]:
    """Return mean and percentiles in microseconds, the first half being warm-up."""
    timed = TimedPlace()
    scale = max(1, options.prefill_nodes // NODES_PER_COPY)
    cluster = SimCluster(CostModel(load_profile("a800-llama70b")), options, timed)
    cluster.run(arrivals(trace, 1.0, scale, 3.0, max(1, requests // scale), 0))
    micros = sorted(second * 1e6 for second in timed.seconds[len(timed.seconds) // 2 :])
    return {
        "mean_us": sum(micros) / len(micros),
        "p50_us": micros[len(micros) // 2],
        "p99_us": micros[int(len(micros) * 0.99)],
    }


def measure_index(nodes: int, blocks: int = 24, chains: int = 20_000) -> float:
    """Return block events a second: chains stored on nodes in turn, and removed again."""
    index = PrefixIndex()
    held = [(number % nodes, range(number * blocks, (number + 1) * blocks)) for number in range(chains)]
    started_s = time.thread_time()
    for node, keys in held:
        index.store(node, keys)
    for node, keys in held:
        index.remove(node, keys)
    return 2 * blocks * chains / (time.thread_time() - started_s)


def main() -> None:
    """Run and print; write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sizes", default="8,64,500")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    sizes = [int(size) for size in args.sizes.split(",")]
    gc.disable()
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        row: dict[str, Any] = {
            name: {
                str(size): measure_place(trace, cluster(size, trace.block_size), args.requests)
                for size in sizes
            }
            for name, cluster in CLUSTERS.items()
        }
        row["index_events_per_s"] = measure_index(sizes[-1])
        rounds.append(row)
        print(json.dumps(row))
    result = {"about": about_run(), "median": medians(rounds, sizes), "rounds": rounds}
    print(json.dumps(result["median"], indent=1))
    write_result(args.out, result)


def medians(rounds: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Return the medians of all rounds, by settings and size."""
    found: dict[str, Any] = {
        name: {
            str(size): {
                key: median(row[name][str(size)][key] for row in rounds)
                for key in ("mean_us", "p50_us", "p99_us")
            }
            for size in sizes
        }
        for name in CLUSTERS
    }
    found["index_events_per_s"] = median(row["index_events_per_s"] for row in rounds)
    return found


if __name__ == "__main__":
    main()
