"""Requests simulated a second: 16 nodes against 1,000, taking turns; peak memory of the process.

    python -m bench.replay TRACE [--rounds 3] [--copies 62 --rows 1500] [--out results.json]
    python -m bench.replay --million [--out results.json]

Requests are placed as in the papers (`cluster_options.PLAIN`): roles are fixed, nobody is refused, nothing is
learned. Beside them 16 nodes whose links are full: 10 Gbit/s each, for a trace that wants as much, so that
hundreds of hand-offs wait.

Seconds are the thread's own on the processor (a busy machine's other work counts only by
the caches it spoils); wall seconds stand beside them. 1,000 nodes serve `copies` copies of
the trace's first `rows` rows.

--million: 1,000 nodes and a million requests of the generator's `conversation`, as fast for
each node as the public trace is for 16. Making the trace is timed apart; the peak of memory
is of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.about_run import about_run, write_result
from bench.hit_rate import OPEN_TRACE
from bench.papers.generate import generate
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.simulate import Plan, simulate
from conductor.replay.trace import Trace
from conductor.replay.trace_formats import read_trace

RATE_PER_NODE = 12_031 / 3_537 / 16
"""Requests a second: the conversation trace over the 16 nodes of the paper."""


FULL_LINKS_BYTES_PER_S = 10 * 125e6
"""Rate of each node's link, which hand-offs of the conversation trace fill on 16 nodes."""
FULL_LINKS_ROWS = 3_000


def measure(
    trace: Trace, nodes: int, copies: int, rows: int | None, link_bytes_per_s: float | None = None
) -> dict[str, float]:
    """Return requests a second of one run, by processor and by wall time."""
    options = ClusterOptions(nodes, nodes, trace.block_size)
    profile = load_profile("a800-llama70b")
    if link_bytes_per_s is not None:
        profile = dataclasses.replace(profile, transfer_bytes_per_s=link_bytes_per_s)
    plan = Plan(trace, CostModel(profile), options, scale=copies, limit=rows)
    started_s, began_s = time.thread_time(), time.perf_counter()
    cluster = simulate(plan)
    seconds, wall_s = time.thread_time() - started_s, time.perf_counter() - began_s
    count = cluster.outcomes.num_arrived
    return {"requests": count, "per_cpu_s": count / seconds, "per_wall_s": count / wall_s}


def measure_million(count: int) -> dict[str, Any]:
    """Return the seconds of a run of `count` generated requests on 1,000 nodes, and its memory."""
    began_s = time.perf_counter()
    trace = generate("conversation", count, RATE_PER_NODE * 1_000, 0)
    made_s = time.perf_counter() - began_s
    run = measure(trace, 500, 1, None)
    return {
        "requests": count,
        "simulated_hours": trace.span_s / 3600,
        "generated_in_s": made_s,
        "run_cpu_s": count / run["per_cpu_s"],
        "run_wall_s": count / run["per_wall_s"],
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Run and print; write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", default=OPEN_TRACE)
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of --million")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=62)
    parser.add_argument("--rows", type=int, default=1_500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure_million(args.requests) if args.million else compare(args)
    result = {"about": about_run(), **result}
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
    write_result(args.out, result)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return requests a second of both sizes, in turns."""
    trace = read_trace(args.trace)
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        small = measure(trace, 8, 1, None)
        large = measure(trace, 500, args.copies, args.rows)
        full = measure(trace, 8, 1, FULL_LINKS_ROWS, FULL_LINKS_BYTES_PER_S)
        rounds.append({"16": small, "1000": large, "large_to_small": large["per_cpu_s"] / small["per_cpu_s"]})
        rounds[-1]["full_links"] = full
        print(json.dumps(rounds[-1]))
    return {
        "16_nodes_per_cpu_s": {
            "median": median(row["16"]["per_cpu_s"] for row in rounds),
            "best": max(row["16"]["per_cpu_s"] for row in rounds),
        },
        "1000_nodes_per_cpu_s": {
            "median": median(row["1000"]["per_cpu_s"] for row in rounds),
            "best": max(row["1000"]["per_cpu_s"] for row in rounds),
        },
        "full_links_per_cpu_s": {
            "median": median(row["full_links"]["per_cpu_s"] for row in rounds),
            "best": max(row["full_links"]["per_cpu_s"] for row in rounds),
        },
        "large_to_small": median(row["large_to_small"] for row in rounds),
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
