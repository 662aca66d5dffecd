"""`python -m bench.decode_parts`: decode attention on a GPU, its contexts cut into several numbers of parts.

Each batch of equal and of unequal contexts is attended to with as many parts as the engine has, and with
others. 32 heads of 128, 8 KV heads, bfloat16; the median of seven replays of a CUDA graph of six layers. What
the memory alone would take stands beside.

    python -m bench.decode_parts --out bench/results/decode_parts.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from bench.shapes import about
from engine.attention import AttentionRule
from engine.kernels.decode_parts import PartCounts, count_parts, decode_parts
from engine.kernels.paged_decode import PROGRAMS, paged_decode

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
LAYERS = 6
REPEATS = 7
WARM_UPS = 4
"""Ways that are timed before those that count: a card that has rested reads 15 % slower for 0.2 s."""
LENGTHS = {
    "1,090": (1090, 1090),
    "800 to 1,400": (800, 1400),
    "8,300": (8300, 8300),
    "500 to 24,000": (500, 24_000),
}
"""Kinds of batches: the least and the greatest length, between which all are as likely."""
BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 256)
COUNTS = (33, 48, 64, 99, 132)
MOST_BYTES = 40e9
BYTES_PER_S = 4.2e12
"""What an H200 reads at most."""


def timed_us(lengths: list[int], ways: list[PartCounts]) -> list[float]:
    """Return the microseconds of a layer for each way to cut."""
    batch, width = len(lengths), -(-max(lengths) // BLOCK)
    num_blocks = [-(-length // BLOCK) for length in lengths]
    dims = (sum(num_blocks), 2, BLOCK, KV_HEADS, DIM)
    caches = [torch.randn(dims, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    query = torch.randn((batch, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    added = torch.randn((2, batch, KV_HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros((batch, width), dtype=torch.int32)
    for row, own in zip(tables, torch.split(torch.randperm(dims[0]), num_blocks), strict=True):
        row[: len(own)] = own
    tables = tables.cuda()
    lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    rule = AttentionRule(DIM**-0.5)

    def attend(counts: PartCounts) -> None:
        parts = decode_parts(lens, counts)[0]
        for cache in caches:
            paged_decode(query, cache, tables, lens, rule, parts=parts, added=(added[0], added[1]))

    found = []
    for counts in (*[ways[0]] * WARM_UPS, *ways):
        attend(counts)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(counts)
        found.append(statistics.median(_replayed_us(graph) for _ in range(REPEATS)) / LAYERS)
    return found[WARM_UPS:]


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * float(began.elapsed_time(ended))


def row_of(kind: str, batch: int) -> dict[str, Any]:
    """Return a row of the result."""
    dice = random.Random(batch)
    lengths = [dice.randint(*LENGTHS[kind]) for _ in range(batch)]
    others = [PartCounts(count, count) for count in COUNTS]
    us, *others_us = timed_us(lengths, [count_parts(KV_HEADS, PROGRAMS, torch.device("cuda", 0)), *others])
    return {
        "lengths": kind,
        "batch": batch,
        "us": us,
        "by_parts_us": dict(zip(map(str, COUNTS), others_us, strict=True)),
        "memory_us": 1e6 * sum(lengths) * 2 * KV_HEADS * DIM * 2 / BYTES_PER_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="", help="where the checkout has no .git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for kind, (_, longest) in LENGTHS.items():
        for batch in BATCHES:
            if LAYERS * batch * longest * 4 * KV_HEADS * DIM < MOST_BYTES:
                rows.append(row_of(kind, batch))
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({**about(options.commit), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
