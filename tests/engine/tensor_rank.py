"""One rank of a tensor-parallel model, in a process of its own: `python -m tests.engine.tensor_rank`."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.batch import build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.quantized_linear import quantize_linears, unrounded_rows
from engine.quantized_weight import WeightFormat
from engine.step import StepEntry, StepPlan
from engine.tensor_parallel import TensorGroup, cut_causal_model
from tests.engine.builders import make_sequence
from tests.engine.test_gpu_model import make_family


def logits_of(family: str, group: TensorGroup | None) -> torch.Tensor:
    """Prefill two prompts and decode a token of each; return the logits of both steps.

    A family "in fp8" has levels, and rows as they are: rounding makes much of the last bit."""
    model = make_family(family.removesuffix(" in fp8"))
    if family.endswith(" in fp8"):
        quantize_linears(model, WeightFormat.FP8)
    if group is not None:
        cut_causal_model(model, group)
    paged = PagedModel(model)
    shape = paged.shape
    layout = replace(shape, block_size=16)
    cache = PagedCache(layout, 8, paged.device)
    sequences = [make_sequence("a", range(30)), make_sequence("b", range(50, 71))]
    tables = [(5, 1), (2, 7)]
    logits = []
    for decoding in (False, True):
        entries = tuple(
            StepEntry(item, len(item.token_ids) - 1, 1, table, samples=True)
            if decoding
            else StepEntry(item, 0, len(item.token_ids) - 1, table, samples=True)
            for item, table in zip(sequences, tables, strict=True)
        )
        batch = build_batch(StepPlan(entries, 2 if decoding else 0), 16, paged.device)
        with unrounded_rows(model):
            logits.append(paged.forward(batch, cache))
    return torch.cat(logits)


def main() -> None:
    family, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    np.save(folder / f"{rank}.npy", logits_of(family, TensorGroup(world, rank, size)).numpy())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
