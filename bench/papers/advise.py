"""`conductor advise TRACE --gpus N`: how to split N nodes for a workload and an SLO.

Every split of the nodes into prefill and decode, with each threshold asked for, and all of
them colocated, is replayed under the same trace and SLO; the best has the largest effective
capacity (requests that met both bounds), and among equals the shortest mean TTFT. The answer
may be "colocate".

Each split is a process of its own running `conductor replay --json`, so that several cores
are used and nothing is shared but the trace file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conductor.replay.report import Report, to_table

# A replay of an hour's trace takes seconds; one that takes this long will not end usefully.
TIMEOUT_S = 1800.0


def splits(
    num_nodes: int, most_stages: int = 1, thresholds: Sequence[float] = ()
) -> list[tuple[str, int, float | None]]:
    """Return every arrangement of `num_nodes`, as `--nodes`, `--stages` and `--threshold` take them."""
    return [(f"{num_nodes}C", 1, None)] + [
        (f"{prefill}P{num_nodes - prefill}D", stages, threshold)
        for prefill in range(1, num_nodes)
        for stages in range(1, most_stages + 1)
        if prefill % stages == 0
        for threshold in (None, *thresholds)
    ]


def ranked(runs: Sequence[Report]) -> list[Report]:
    """Return the runs, best first."""
    return sorted(runs, key=lambda run: (-run["effective_capacity"], run["ttft_s"]["mean"]))


def pareto(runs: Sequence[Report]) -> list[Report]:
    """Return the runs that no other beats in both mean TTFT and 99th percentile TBT."""

    def beats(one: Report, other: Report) -> bool:
        first = (one["ttft_s"]["mean"], one["tbt_s"]["p99"])
        second = (other["ttft_s"]["mean"], other["tbt_s"]["p99"])
        return first != second and first[0] <= second[0] and first[1] <= second[1]

    return [run for run in runs if not any(beats(other, run) for other in runs)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what it does not know is passed to every replay."""
    parser = argparse.ArgumentParser(
        prog="conductor advise",
        description="Best split of nodes for a trace and an SLO; other options are those of replay.",
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="nodes to split, 2 at least")
    parser.add_argument(
        "--most-stages", type=int, default=1, metavar="X", help="pipelined prefill groups of 2 to X nodes too"
    )
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        default=(),
        metavar="X",
        help="kvcache_balancing_thresholds to try beside the cost model's own choice",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="replays at a time")
    args, passed = parser.parse_known_args(argv)
    if args.gpus < 2:
        parser.error("--gpus: 2 at least, one to prefill and one to decode")
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        arrangements = splits(args.gpus, args.most_stages, args.thresholds)
        results = list(
            pool.map(lambda each: _replay(args.trace, each[0], each[1], each[2], passed), arrangements)
        )
    for result in results:
        if isinstance(result, str):
            sys.stderr.write(result)
            return 2
    best = ranked([result for result in results if not isinstance(result, str)])
    sys.stdout.write(f"{to_table(best)}\n\nbest: {name_of(best[0])}")
    front = ", ".join(name_of(run) for run in pareto(best))
    sys.stdout.write(f"\nnone is better in both mean TTFT and p99 TBT than: {front}\n")
    return 0


def name_of(run: Report) -> str:
    """Return how `--nodes` would say it."""
    if "colocated_nodes" in run:
        return f"{run['colocated_nodes']}C (colocate)"
    stages = f" in groups of {run['stages']}" if run["stages"] > 1 else ""
    threshold = "" if run["threshold"] is None else f" with threshold {run['threshold']:g}"
    return f"{run['prefill_nodes']}P{run['decode_nodes']}D{stages}{threshold}"


def _replay(
    trace: Path, nodes: str, stages: int, threshold: float | None, passed: Sequence[str]
) -> Report | str:
    """Return the report of one split, or what the replay wrote to its standard error."""
    command = [
        sys.executable,
        "-m",
        "bench.papers",
        str(trace),
        "--nodes",
        nodes,
        "--stages",
        str(stages),
        "--json",
        *(() if threshold is None else ("--threshold", str(threshold))),
        *passed,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        return done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    return run  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
