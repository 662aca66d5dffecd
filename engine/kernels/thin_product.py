"""Matrix product of a few rows by a large weight: launcher, and a kernel for one row.

With so few rows the product is a reading of the weight, and cuBLAS does not read it as fast as the memory
goes: 13.3 us for 4096 x 4096 and one row, where one program for eight columns takes 10.9 and the bytes alone
8.0; 12.8 us for 1024 x 2048, here 4.4; 283 us for 8 rows by a head of 128,256 x 4096, here 242 (H200,
bfloat16, 2026-11-21).

One row is summed on the ordinary units; up to `MAX_ROWS` are padded to a tile of the tensor cores, in
programs that share the inputs of a narrow weight (`streamed_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.streamed_product import float_product

MAX_ROWS = 32
"""Number of rows up to which this is faster than cuBLAS."""


def thin_product(rows: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight.T, [num_rows, out_features], summed in float32.

    Args:
        rows: [num_rows, in_features], num_rows <= MAX_ROWS, contiguous.
        weight: [out_features, in_features], contiguous, of the same dtype.
        counters: `part_counters`.

    Raises ValueError for a shape, stride or dtype that the kernels do not take."""
    num_rows, in_features = rows.shape
    if num_rows > MAX_ROWS or weight.shape[1] != in_features:
        raise ValueError(f"rows {tuple(rows.shape)} and weight {tuple(weight.shape)} do not fit")
    if rows.dtype != weight.dtype:
        raise ValueError(f"rows are {rows.dtype}, the weight {weight.dtype}")
    if not rows.is_contiguous() or not weight.is_contiguous():
        raise ValueError("rows and weight must be contiguous")
    if num_rows != 1:
        return float_product(rows, weight, counters)
    out_features = weight.shape[0]
    output = rows.new_empty((1, out_features))
    columns = 4 if out_features <= 1024 else 8
    _one_row[(triton.cdiv(out_features, columns),)](
        rows, weight, output, out_features, in_features,
        COLUMNS=columns, STEP=4096 // columns, num_warps=4, **overlapping(rows.device),
    )  # fmt: skip
    return output


@triton.jit
def _one_row(
    row,  # [in_features]
    weight,  # [out_features, in_features]
    output,  # [out_features]
    out_features,
    in_features,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    source = weight + column[:, None].to(tl.int64) * in_features + steps[None, :]
    inside = (column < out_features)[:, None]
    _await_inputs(OVERLAPS)
    total = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in range(0, in_features, STEP):
        left = start + steps < in_features
        w = tl.load(source + start, mask=inside & left[None, :], other=0.0)
        x = tl.load(row + start + steps, mask=left, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    _launch_next(OVERLAPS)
    tl.store(output + column, tl.sum(total, 1), mask=column < out_features)
