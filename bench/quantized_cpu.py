"""`python -m bench.quantized_cpu`: decode steps with int8 weights beside float32 ones, on this CPU.

Eight streams of SmolLM2, a token each a step, after so many tokens of context. The two take turns of a few
steps in one process, so that a noisy machine disturbs both alike; what counts is the ratio of the medians.
Then each computes with its products of weights left out, which says what fewer bits cannot make shorter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from base.block_hash import BlockHash
from base.request import RequestId, SamplingParams, StopParams
from bench.about_run import about_run, write_result
from bench.local_cluster import smollm2
from engine.batch import Batch, build_batch
from engine.integer_product import IntegerLinear
from engine.model import PagedModel
from engine.packed_linear import PackedLinear, pack_linears
from engine.paged_cache import PagedCache
from engine.quantized_linear import quantize_linears, use_cpu_products
from engine.quantized_weight import WeightFormat
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan
from engine.weights import load_model

BLOCK_SIZE = 64
CPU = torch.device("cpu")
TURN = 6
"""Steps of a turn; the first of each, which finds the caches full of the other's weights, is left out."""


def batch_of(streams: int, context: int) -> Batch:
    """Return a decode step of sequences that have `context` tokens with the new one."""
    each = -(-context // BLOCK_SIZE)
    entries = []
    for place in range(streams):
        token_ids = [(at * 7919 + place) % 40_000 for at in range(context)]
        sequence = Sequence(
            RequestId(str(place)), token_ids, context, BlockHash(b""), SamplingParams(), StopParams(1)
        )
        table = tuple(range(place * each, (place + 1) * each))
        entries.append(StepEntry(sequence, context - 1, 1, table, samples=True))
    return build_batch(StepPlan(tuple(entries), num_single=streams), BLOCK_SIZE, CPU)


def models(folder: Path) -> Iterator[tuple[str, PagedModel]]:
    """Yield the float32 model and the int8 one, each as a node makes it."""
    for name in ("float32", "int8"):
        module = load_model(folder, torch.float32)
        if name == "int8":
            quantize_linears(module, WeightFormat.INT8, module.get_output_embeddings())
            use_cpu_products(module)
        pack_linears(module)
        yield name, PagedModel(module)


def step_ms(each: dict[str, PagedModel], batch: Batch, cache: PagedCache, turns: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each model."""
    taken: dict[str, list[float]] = {name: [] for name in each}
    for turn in range(turns + 1):
        for name, model in each.items():
            for place in range(TURN):
                began_s = time.perf_counter()
                model.forward(batch, cache)
                if turn and place:
                    taken[name].append(1e3 * (time.perf_counter() - began_s))
    return {name: median(values) for name, values in taken.items()}


@contextmanager
def without_products() -> Iterator[None]:
    """Let layers with packed weights return what their memory holds, in the body."""

    def nothing(layer: PackedLinear | IntegerLinear, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((*rows.shape[:-1], layer.out_features))

    with patch.object(PackedLinear, "forward", nothing), patch.object(IntegerLinear, "forward", nothing):
        yield


def compared(each: dict[str, PagedModel], streams: int, context: int, turns: int) -> dict[str, object]:
    """Return the figures of one length of context."""
    layout = replace(each["int8"].shape, block_size=BLOCK_SIZE)
    cache = PagedCache(layout, streams * layout.num_blocks(context), CPU)
    cache.tensor.zero_()
    batch = batch_of(streams, context)
    whole = step_ms(each, batch, cache, turns)
    with without_products():
        rest = step_ms(each, batch, cache, 1)
    return {
        "threads": torch.get_num_threads(),
        "streams": streams,
        "context": context,
        "step_ms": whole,
        "times_float32": whole["float32"] / whole["int8"],
        "without_products_ms": rest,
        "times_float32_of_products": (whole["float32"] - rest["float32"]) / (whole["int8"] - rest["int8"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized_cpu", description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 264])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with torch.inference_mode():
        each = dict(models(Path(smollm2().path)))
        for threads, context in product(options.threads, options.contexts):
            torch.set_num_threads(threads)
            rows.append(compared(each, options.streams, context, options.turns))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "bench": "quantized_cpu",
        "about": about_run("torch"),
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()
