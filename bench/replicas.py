"""What copying hot prefixes ahead of requests does, in replay: mean and p99 TTFT with and without.

    python -m bench.replicas TRACE [--json bench/results/replicas.json]

The conversation trace at 8P8D, and two generated traces: `toolagent`, whose sessions share a
few bases, and `burst`, where a document of 16,384 tokens that one node has is asked about by 120
requests within 20 s, six times: heat and skew at their worst. `burst, slow` has links of a
sixteenth, over which a document takes 0.9 s. Everything is virtual, so a run says the same each
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench.about_run import about_run
from bench.papers.generate import generate
from conductor.placing.cost_model import CostModel
from conductor.profile_file import load_profile
from conductor.replay.cluster import Cluster
from conductor.replay.cluster_options import ClusterOptions
from conductor.replay.trace import TraceRequest
from conductor.replay.trace_formats import read_trace

BLOCK_SIZE = 512
DOCUMENT_BLOCKS = 32
NODES = 8
"""Of each role."""
BURSTS = 6
READERS = 120
BURST_S = 20.0
EVERY_S = 60.0
WARM_UP_S = 60.0


def burst(seed: int) -> list[TraceRequest]:
    """Return requests of which those of one burst share a document and nothing else."""
    rng = Random(seed)
    made: list[TraceRequest] = []
    number = 0
    for at in range(BURSTS):
        document = [10_000_000 * (at + 1) + block for block in range(DOCUMENT_BLOCKS)]
        for reader in range(READERS + 1):
            # the first comes long before the others
            arrival_s = at * 5.0 if not reader else WARM_UP_S + at * EVERY_S + rng.uniform(0.0, BURST_S)
            own = [1_000 * number + block for block in range(rng.randrange(1, 5))]
            number += 1
            chain = tuple(document + own)
            made.append(TraceRequest(arrival_s, len(chain) * BLOCK_SIZE, 100, chain))
    return sorted(made, key=lambda request: request.arrival_s)


def measure(rows: Sequence[TraceRequest], policy: str, replicate: bool, slower: float) -> dict[str, Any]:
    profile = load_profile("a800-llama70b")
    profile = dataclasses.replace(profile, transfer_bytes_per_s=profile.transfer_bytes_per_s / slower)
    options = ClusterOptions(NODES, NODES, BLOCK_SIZE, policy=policy, replicate=replicate)
    cluster = Cluster(CostModel(profile), options)
    cluster.run(rows)
    ttft_s = sorted(cluster.outcomes.ttft_s)
    copies = cluster.replication
    return {
        "policy": policy,
        "replicate": replicate,
        "mean_ttft_s": fmean(ttft_s),
        "p99_ttft_s": ttft_s[int(0.99 * len(ttft_s))],
        "hit_rate_tokens": cluster.outcomes.hit_rate_tokens(),
        "copies": copies.num_copies if copies is not None else 0,
        "copied_tb": copies.bytes_copied / 1e12 if copies is not None else 0.0,
        "moved_tb": cluster.links.bytes_moved / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replicas", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    traces: dict[str, Sequence[TraceRequest]] = {
        "burst": burst(1),
        "burst, slow": burst(1),
        "toolagent": generate("toolagent", 3_000, 8.0, 1).requests,
        "conversation": read_trace(arguments.trace).requests,
    }
    result: dict[str, Any] = {"about": about_run()}
    for name, rows in traces.items():
        result[name] = []
        for policy in ("global", "local"):
            for replicate in (False, True):
                row = measure(rows, policy, replicate, 16.0 if name.endswith("slow") else 1.0)
                result[name].append(row)
                print(name, json.dumps(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
