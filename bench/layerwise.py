"""`python -m bench.layerwise`: how much of a hand-off computation hides, by how layers leave.

A prefill node and a decode node as in `bench/handoff.py`, one request at a time, once for each way:

    1 group         a chunk's KV leaves when all its layers are computed
    N groups        in N parts, each when its layers are (one rank, long chunks)
    N stages        a pipeline of N ranks: each stage's layers leave when it has run the chunk

Reported is the median exposed transfer, in ms and as a share of the prefill, whose bar is 3 %, and the KV
that the prefill node holds: the most of it, and its GiB times the seconds that it is held, for each request.
Where layers leave while others are computed, it is held for the prefill and not for the transfer too.
The ways are measured one after the other, `--rounds` times over.

    python -m bench.layerwise --groups 1,4,8 --stages 2,4 --lengths 16384,32768 --out layerwise.json
    python -m bench.layerwise --model tiny --shared-gpu --kv-cache-gib 0.1 --groups 1 --stages 2 \\
        --lengths 1024 --chunk-tokens 256 --repeats 1 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.about_run import about_run, write_result
from bench.handoff import Row, measure
from bench.local_cluster import LocalCluster
from bench.shapes import Limits, about, model_config, parse_shape, running

LOOK_EVERY_S = 0.02


def ways_of(options: argparse.Namespace) -> dict[str, Limits]:
    """Return what bounds the nodes, for each way."""
    base = Limits(
        max_batch=8,
        max_model_len=options.max_model_len or max(options.lengths) + 64,
        kv_cache_gib=options.kv_cache_gib,
        shared_gpu=options.shared_gpu,
    )
    ways = {f"{count} groups": replace(base, layer_groups=count) for count in options.groups}
    return ways | {f"{count} stages": replace(base, stages=count) for count in options.stages}


class HeldKv:
    """Looks at the KV that prefill nodes hold, from a thread, while the body runs: as their heartbeats
    report it, which they do when it changes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._url = f"{cluster.url}/status"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_tokens = 0
        self.token_seconds = 0.0

    def __enter__(self) -> HeldKv:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        before_s = time.perf_counter()
        while not self._stop.wait(LOOK_EVERY_S):
            with urllib.request.urlopen(self._url) as answer:
                nodes = json.load(answer)["nodes"]
            held = [
                node["held_blocks"] * node["block_size"]
                for node in nodes
                if "prefill" in node["roles"] and "held_blocks" in node
            ]
            now_s = time.perf_counter()
            self.peak_tokens = max(self.peak_tokens, *held)
            self.token_seconds += sum(held) * (now_s - before_s)
            before_s = now_s


@dataclass(frozen=True, slots=True)
class Measured:
    """One length of one way."""

    row: Row
    held_gib_s: float
    """GiB of KV times the seconds that they are held, in the mean of requests."""
    peak_gib: float


def token_gib(model: str) -> float:
    """Return the KV of one token, in the precision that nodes choose on this machine."""
    config = model_config(model)
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads: int = config.num_hidden_layers * config.num_key_value_heads
    width = 2 if torch.cuda.is_available() else 4
    return 2 * heads * head_dim * width / 2**30


def measured(options: argparse.Namespace, limits: Limits, seed: int) -> list[Measured]:
    """Start a cluster, measure each length, and end it."""
    rng = random.Random(seed)
    vocab_size, gib = model_config(options.model).vocab_size, token_gib(options.model)
    shape = parse_shape(f"1p1d@{options.chunk_tokens}")
    rows = []
    with running(options.model, shape, limits, options.logs) as cluster:
        for length in options.lengths:
            with HeldKv(cluster) as held:
                row = measure(cluster, length, options.repeats, vocab_size, rng)
            num_requests = options.repeats + 1
            rows.append(Measured(row, held.token_seconds * gib / num_requests, held.peak_tokens * gib))
    return rows


def summary(way: str, rounds: list[list[Measured]]) -> list[dict[str, Any]]:
    """Return the medians over all rounds of one way, for each length."""
    rows = []
    for of_length in zip(*rounds, strict=True):
        found = [each.row for each in of_length]
        shares = [row.exposed_share for row in found]
        rows.append(
            {
                "way": way,
                "prompt_tokens": found[0].prompt_tokens,
                "ttft_ms": statistics.median(row.ttft_ms for row in found),
                "compute_ms": statistics.median(row.compute_ms for row in found),
                "exposed_ms": statistics.median(row.exposed_ms for row in found),
                "held_gib_s": statistics.median(each.held_gib_s for each in of_length),
                "peak_gib": max(each.peak_gib for each in of_length),
                "exposed_share": statistics.median(shares),
                "worst_share": max(shares),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.layerwise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(","))) if text else ()

    add = parser.add_argument
    add("--model", default="8b", choices=["8b", "0.6b", "tiny"])
    add("--groups", type=numbers, default=(1, 4, 8))
    add("--stages", type=numbers, default=(2,))
    add("--lengths", type=numbers, default=(16_384,))
    add("--chunk-tokens", type=int, default=8192, help="of a step")
    add("--repeats", type=int, default=5)
    add("--rounds", type=int, default=3)
    add("--shared-gpu", action="store_true", help="all nodes on one GPU, or on none")
    add("--kv-cache-gib", type=float, default=0.0)
    add("--max-model-len", type=int, default=0)
    add("--logs", type=Path)
    add("--commit", default="")
    add("--out", type=Path)
    options = parser.parse_args()
    rounds: dict[str, list[list[Measured]]] = {}
    for number in range(options.rounds):
        for way, limits in ways_of(options).items():
            rounds.setdefault(way, []).append(measured(options, limits, number))
    rows = [row for way, of_way in rounds.items() for row in summary(way, of_way)]
    for row in rows:
        print(json.dumps(row), flush=True)
    report = {**about_run("torch"), **about(options.commit), "chunk": options.chunk_tokens, "rows": rows}
    write_result(options.out, report)


if __name__ == "__main__":
    main()
