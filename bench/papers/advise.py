"""`conductor advise TRACE --gpus N`: how to split N nodes for a workload and an SLO.

Every split of the nodes into prefill and decode, with each threshold and each length of a chunk asked for,
and all of them colocated, is replayed under the same trace, bounds and settings; the best serves the largest
share of requests within both bounds, and among equals has the shortest mean TTFT. The answer may be
"colocate", that several are tied, or that nothing serves half. With `--share` it is the fewest nodes whose
best split serves so much, and that split.

The settings are those that the service ships with, or with `--config cluster.yaml` those of a deployed
cluster. Each split is a process of its own running `conductor replay --json`, so that several cores
are used and nothing is shared but the trace file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from base.errors import ConfigError
from base.option_values import real, whole
from bench.papers.chart import Line, chart
from conductor.replay.arguments import MAX_NODES
from conductor.replay.report import Report, to_table

# A replay of an hour's trace takes seconds; one that takes this long will not end usefully.
TIMEOUT_S = 1800.0

USEFUL_SHARE = 0.5
"""A best split that serves less is no advice."""


class Arrangement(NamedTuple):
    """One way to use the nodes."""

    nodes: str
    """As `--nodes` takes it."""
    stages: int = 1
    threshold: float | None = None
    chunk_tokens: int | None = None

    def arguments(self) -> list[str]:
        """Return what a replay is given for it."""
        words = ["--nodes", self.nodes, "--stages", str(self.stages)]
        for name, value in (("--threshold", self.threshold), ("--chunk-tokens", self.chunk_tokens)):
            words += [] if value is None else [name, str(value)]
        return words


def splits(
    num_nodes: int,
    most_stages: int = 1,
    thresholds: Sequence[float] = (),
    chunks: Sequence[int] = (),
) -> list[Arrangement]:
    """Return every arrangement of `num_nodes`."""
    sizes: list[int | None] = list(chunks) or [None]
    together = [Arrangement(f"{num_nodes}C", chunk_tokens=size) for size in sizes]
    return together + [
        Arrangement(f"{prefill}P{num_nodes - prefill}D", stages, threshold, size)
        for prefill in range(1, num_nodes)
        for stages in range(1, most_stages + 1)
        if prefill % stages == 0
        for threshold in (None, *thresholds)
        # a pipelined group takes a prompt whole
        for size in (sizes if stages == 1 else [None])
    ]


def ranked(runs: Sequence[Report]) -> list[Report]:
    """Return the runs, best first."""
    return sorted(runs, key=lambda run: (-run["effective_capacity"], run["ttft_s"]["mean"]))


def tied(runs: Sequence[Report]) -> list[Report]:
    """Return the runs that serve as large a share as the best, as far as so many requests can tell.

    A share of n requests has a standard error; what is within one of the best is no worse.
    """
    best = ranked(runs)[0]
    share = best["effective_capacity"]
    error = sqrt(share * (1 - share) / max(1, best["requests"]))
    return [run for run in ranked(runs)[1:] if share - run["effective_capacity"] <= max(error, 1e-9)]


def pareto(runs: Sequence[Report]) -> list[Report]:
    """Return the runs that no other beats in both mean TTFT and 99th percentile TBT."""

    def beats(one: Report, other: Report) -> bool:
        first = (one["ttft_s"]["mean"], one["tbt_s"]["p99"])
        second = (other["ttft_s"]["mean"], other["tbt_s"]["p99"])
        return first != second and first[0] <= second[0] and first[1] <= second[1]

    return [run for run in runs if not any(beats(other, run) for other in runs)]


def fewest(most: int, share: float, best_of: Callable[[int], Report]) -> tuple[int, Report] | None:
    """Return the fewest nodes, `most` at most, of which the best arrangement serves `share`; None: none does.

    By bisection: more nodes serve no less.
    """
    found = best_of(most)
    if found["effective_capacity"] < share:
        return None
    low, high = 2, most
    while low < high:
        middle = (low + high) // 2
        run = best_of(middle)
        if run["effective_capacity"] >= share:
            high, found = middle, run
        else:
            low = middle + 1
    return high, found


def advice(runs: Sequence[Report]) -> str:
    """Return what the runs of one number of nodes say."""
    best = ranked(runs)
    lines = [f"best: {name_of(best[0])}"]
    if alike := tied(runs):
        names, count = ", ".join(map(name_of, alike)), best[0]["requests"]
        lines.append(f"tied with it, as far as {count} requests can tell: {names}")
    if (share := best[0]["effective_capacity"]) < USEFUL_SHARE:
        lines.append(
            f"warning: even that serves {share:.0%} of the requests within their bounds: "
            "more nodes or wider bounds are wanted (--slo-ttft, --slo-tbt)"
        )
    front = ", ".join(name_of(run) for run in pareto(best))
    return "\n".join([*lines, f"none is better in both mean TTFT and p99 TBT than: {front}"])


def name_of(run: Report) -> str:
    """Return how `--nodes` would say it, and what else was asked for."""
    words = [f"{run['colocated_nodes']}C (colocate)"] if "colocated_nodes" in run else []
    if not words:
        words = [f"{run['prefill_nodes']}P{run['decode_nodes']}D"]
        words += [f"in groups of {run['stages']}"] if run["stages"] > 1 else []
    if run["threshold"] is not None:
        words.append(f"with threshold {run['threshold']:g}")
    if run.get("chunk_tokens") is not None:
        words.append(f"with chunks of {run['chunk_tokens']}")
    return " ".join(words)


def drawn(title: str, runs: Sequence[Report]) -> str:
    """Return a page with a chart of each measure by the number of prefill nodes."""
    measures: tuple[tuple[str, Callable[[Report], float]], ...] = (
        ("Share of requests within their bounds", lambda run: run["effective_capacity"]),
        ("Share of tokens within their bounds", lambda run: run["effective_tokens"]),
        ("Mean TTFT, seconds", lambda run: run["ttft_s"]["mean"]),
        ("99th percentile of TBT, seconds", lambda run: run["tbt_s"]["p99"]),
    )
    charts = "".join(
        f"<figure><figcaption>{escape(heading)}</figcaption>"
        f"{chart(heading, 'prefill nodes; colocated nodes as a level', _lines(runs, measure))}</figure>"
        for heading, measure in measures
    )
    said = "".join(f"<p>{escape(line)}</p>" for line in advice(runs).splitlines())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title></head><body><h1>{escape(title)}</h1>{said}{charts}</body></html>\n"
    )


def _lines(runs: Sequence[Report], measure: Callable[[Report], float]) -> list[tuple[str, Line]]:
    """Return a line for each kind of arrangement."""
    lines: dict[str, Line] = {}
    most = max((run["prefill_nodes"] for run in runs if "prefill_nodes" in run), default=1)
    for run in runs:
        if "colocated_nodes" in run:
            lines[name_of(run)] = [(0.0, measure(run)), (float(most), measure(run))]
        else:
            kind = name_of(run).partition(" ")[2] or "prefill and decode"
            lines.setdefault(kind, []).append((float(run["prefill_nodes"]), measure(run)))
    return [(name, sorted(line)) for name, line in lines.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what it does not know is passed to every replay."""
    parser = argparse.ArgumentParser(
        prog="conductor advise",
        description="Best split of nodes for a trace and an SLO; other options are those of replay.",
    )
    add = parser.add_argument
    add("trace", type=Path)
    most = whole(2, MAX_NODES)
    add(
        "--gpus",
        type=most,
        required=True,
        metavar="N",
        help="nodes to split, 2 at least; with --share at most",
    )
    stages = "pipelined prefill groups of 2 to X nodes too"
    add("--most-stages", type=whole(1, MAX_NODES), default=1, metavar="X", help=stages)
    thresholds = "kvcache_balancing_thresholds to try beside the cost model's own choice"
    add("--thresholds", type=real(0, above=True), nargs="+", default=(), metavar="X", help=thresholds)
    chunks = "lengths of a chunk to try in place of the profile's or the deployed one"
    add("--chunks", type=whole(0, 1 << 20), nargs="+", default=(), metavar="N", help=chunks)
    share = "find the fewest nodes that serve such a share of the requests within their bounds"
    add("--share", type=real(0, 1, above=True), metavar="X", help=share)
    add("--html", type=Path, metavar="OUT.html", help="a page that draws the splits")
    add("--jobs", type=whole(1, 1024), default=os.cpu_count() or 1, help="replays at a time")
    args, passed = parser.parse_known_args(argv)
    try:
        return _advise(args, passed)
    except ConfigError as error:
        sys.stderr.write(str(error))
        return 2


def _advise(args: argparse.Namespace, passed: Sequence[str]) -> int:
    tried: dict[int, list[Report]] = {}

    def best_of(num_nodes: int) -> Report:
        arrangements = splits(num_nodes, args.most_stages, args.thresholds, args.chunks)
        with ThreadPoolExecutor(args.jobs) as pool:
            replayed = pool.map(_replay, itertools.repeat(args.trace), arrangements, itertools.repeat(passed))
            tried[num_nodes] = ranked(list(replayed))
        return tried[num_nodes][0]

    num_nodes = args.gpus
    if args.share is None:
        best_of(num_nodes)
    else:
        found = fewest(num_nodes, args.share, best_of)
        if found is None:
            share = tried[num_nodes][0]["effective_capacity"]
            sys.stdout.write(f"{num_nodes} nodes serve {share:.1%}: {args.share:.1%} takes more\n")
        else:
            num_nodes = found[0]
            served = ", ".join(
                f"{number}: {runs[0]['effective_capacity']:.1%}" for number, runs in sorted(tried.items())
            )
            sys.stdout.write(f"fewest nodes: {num_nodes} (best split of each number tried: {served})\n")
    runs = tried[num_nodes]
    sys.stdout.write(f"{to_table(runs)}\n\n{advice(runs)}\n")
    if args.html:
        args.html.write_text(drawn(f"conductor advise {args.trace.name}", runs))
    return 0


def _replay(trace: Path, arrangement: Arrangement, passed: Sequence[str]) -> Report:
    """Return the report of one arrangement; ConfigError with what the replay wrote to its standard error."""
    command = [sys.executable, "-m", "bench.papers", str(trace), "--json"]
    # after what was given: it stands for what the deployed cluster has of it
    command += [*passed, *arrangement.arguments()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(done.stderr)
    (run,) = json.loads(done.stdout)["runs"]
    return run  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
