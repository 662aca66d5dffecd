"""Sums that programs share: each makes a part of them, and the last to end adds the parts up, in order.

A narrow weight has too few outputs to keep a GPU busy with a program for each; so its inputs are shared out
as well. Which program ends last differs from run to run, what it adds up and in what order does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

NARROW = 8192
"""Outputs of a weight up to which too few programs would be busy, each with all inputs."""

PART_TILES = 512
"""Tiles of a product, at most, whose inputs are shared out: each has a counter."""


class Tiles(NamedTuple):
    """How a product is shared out."""

    columns: int
    """Outputs of a program."""
    parts: int
    """Programs that share the inputs of these."""
    warps: int
    stages: int
    """Loads under way."""
    rows: int = 0
    """Rows of a program; 0: all of them."""


def shared_parts(num_tiles: int, most: int, programs: int) -> int:
    """Return among how many programs a tile's inputs are shared out: a power of two, `most` of them at most.

    Args:
        num_tiles: Tiles of the product.
        programs: Programs of all tiles together, at most."""
    parts = 1
    while parts < most and 2 * parts * num_tiles <= programs:
        parts *= 2
    return parts


def part_counters(device: torch.device) -> torch.Tensor:
    """Return counts of each tile's parts that ended, [PART_TILES] int32: zeros, as after each product."""
    return torch.zeros(PART_TILES, dtype=torch.int32, device=device)


def room_for_parts(output: torch.Tensor, parts: int) -> torch.Tensor:
    """Return what parts of `output` are written to, [parts, ...] float32; of one alone, `output` itself."""
    return output if parts == 1 else output.new_empty((parts, *output.shape), dtype=torch.float32)


@triton.jit
def _store_shared(
    total,  # the sums of this program, float32
    target,  # their places in output
    mask,
    output,
    partial,  # [PARTS, size]
    counter,  # the tile's
    size,  # numbers of output
    PARTS: tl.constexpr,
):
    """Store the sums of a part, and if it is the last one to end, those of all."""
    if PARTS == 1:
        tl.store(output + target, total, mask=mask)
    else:
        tl.store(partial + tl.program_id(1) * size + target, total, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros(total.shape, tl.float32)
            for each in tl.static_range(PARTS):
                total += tl.load(partial + each * size + target, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(output + target, total, mask=mask)
            tl.store(counter, 0)
