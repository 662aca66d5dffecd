"""`python -m bench.decode_parts`: decode attention on a GPU, its contexts cut in several ways.

Each batch of equal contexts is attended to with the parts that `engine/kernels/decode_parts.py` chooses, and
with every sequence in so many parts. 32 heads of 128, 8 KV heads, bfloat16; the median of seven replays of a
CUDA graph of six layers. What the memory alone would take stands beside.

    python -m bench.decode_parts --out bench/results/decode_parts.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from bench.shapes import about
from engine.attention import AttentionRule
from engine.kernels.decode_parts import FEW_HEADS, PROGRAMS, KernelPrograms, decode_parts
from engine.kernels.paged_decode import paged_decode

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
LAYERS = 6
REPEATS = 7
WARM_UPS = 4
"""Ways that are timed before those that count: a card that has rested reads 15 % slower for 0.2 s."""
LENGTHS = (1090, 8300, 24_000)
BATCHES = (1, 8, 16, 17, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128, 256)
PARTS = (1, 2, 3, 4, 8)
MOST_BYTES = 40e9
BYTES_PER_S = 4.2e12
"""What an H200 reads at most."""


def timed_us(batch: int, length: int, ways: list[KernelPrograms]) -> list[float]:
    """Return the microseconds of a layer for each way to cut."""
    num_blocks = -(-length // BLOCK)
    dims = (batch * num_blocks, 2, BLOCK, KV_HEADS, DIM)
    caches = [torch.randn(dims, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    query = torch.randn((batch, HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    added = torch.randn((2, batch, KV_HEADS, DIM), device="cuda", dtype=torch.bfloat16)
    tables = torch.arange(dims[0], device="cuda", dtype=torch.int32).view(batch, num_blocks)
    lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    rule = AttentionRule(DIM**-0.5)

    def attend(programs: KernelPrograms) -> None:
        parts = decode_parts(lens, KV_HEADS, programs)
        for cache in caches:
            paged_decode(query, cache, tables, lens, rule, parts=parts, added=(added[0], added[1]))

    found = []
    for programs in (*[ways[0]] * WARM_UPS, *ways):
        attend(programs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(programs)
        found.append(statistics.median(_replayed_us(graph) for _ in range(REPEATS)) / LAYERS)
    return found[WARM_UPS:]


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * float(began.elapsed_time(ended))


def row_of(batch: int, length: int) -> dict[str, Any]:
    """Return a row of the result."""
    chosen = PROGRAMS[batch * KV_HEADS > FEW_HEADS]
    parts = [count for count in PARTS if count * BLOCK <= length]
    ways = [chosen, *(KernelPrograms(count * batch * KV_HEADS) for count in parts)]
    us, *others = timed_us(batch, length, ways)
    read = batch * length * 2 * KV_HEADS * DIM * 2
    return {
        "batch": batch,
        "length": length,
        "us": us,
        "by_parts_us": dict(zip(map(str, parts), others, strict=True)),
        "memory_us": 1e6 * read / BYTES_PER_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="", help="where the checkout has no .git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for length in LENGTHS:
        for batch in BATCHES:
            if LAYERS * batch * length * 4 * KV_HEADS * DIM < MOST_BYTES:
                rows.append(row_of(batch, length))
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps({**about(options.commit), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
