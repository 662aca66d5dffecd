"""Matrix products by weights of 8 bits: launchers and kernels.

A product of a few rows is a reading of the weight: the kernel reads its levels, turns them into the rows'
dtype beside the tensor cores, and multiplies the sums of each group by its scale. For many rows the weight is
written out once, by a kernel of its own, and cuBLAS multiplies.

One H100 (3.0 TB/s), torch 2.11, triton 3.6; bfloat16 / this kernel on int8 / `torch._scaled_mm` on fp8:

    rows                       1      16     32     64     256
    28,672 x 4,096, us   79/46/54  84/48/50  86/75/49  88/92/51  104/236/59
    4,096 x 14,336, us   43/37/37  45/38/37  46/44/37  48/63/37   60/127/38

Levels of four bits have a kernel of their own (`nibble_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
"""Number of rows that the kernel takes."""

TILES = 32, 128, 4, 6
"""Outputs of a program, inputs of a step at most, warps, and the loads under way."""

FEW = 16
FEW_TILES = 32, 256, 4, 4
"""Tiles of at most `FEW` rows: 4,096 x 14,336 of fp8 take 25.0 us by these, 29.3 by the others (one H200)."""


def few_rows_product(
    rows: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """Return rows @ weight.T, [num_rows, out_features], summed in float32.

    Args:
        rows: [num_rows, in_features], num_rows <= MAX_ROWS, contiguous.
        levels, scales, zeros, group: As `QuantizedWeight` has them, contiguous.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_rows, in_features = rows.shape
    _require_weight(in_features, levels, scales, zeros, group)
    if num_rows > MAX_ROWS or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous, and {MAX_ROWS} at most")
    out_features, num_groups = scales.shape
    output = rows.new_empty((num_rows, out_features))
    columns, step, warps, stages = FEW_TILES if num_rows <= FEW else TILES
    if num_rows:
        _few_rows[(triton.cdiv(out_features, columns),)](
            rows, levels, scales, scales if zeros is None else zeros, output,
            num_rows, out_features, in_features, num_groups,
            ROWS=max(16, triton.next_power_of_2(num_rows)), COLUMNS=columns,
            STEP=min(step, group) if num_groups > 1 else step, GROUP=group if num_groups > 1 else 0,
            HAS_ZEROS=zeros is not None, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return output


def written_out(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight, [out_features, in_features] `dtype`; arguments as for `few_rows_product`."""
    in_features = levels.shape[1]
    _require_weight(in_features, levels, scales, zeros, group)
    out_features, num_groups = scales.shape
    output = torch.empty((out_features, in_features), dtype=dtype, device=levels.device)
    grid = (triton.cdiv(out_features, 16), triton.cdiv(in_features, 256))
    _write_out[grid](
        levels, scales, scales if zeros is None else zeros, output, out_features, in_features, num_groups,
        ROWS=16, STEP=256, GROUP=group, HAS_ZEROS=zeros is not None, num_warps=4,
    )  # fmt: skip
    return output


def _require_weight(
    in_features: int, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
) -> None:
    if levels.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"levels are {levels.dtype}")
    if levels.shape != (scales.shape[0], in_features):
        raise ValueError(f"levels {tuple(levels.shape)} do not fit {in_features} inputs")
    parts = [levels, scales, *([] if zeros is None else [zeros])]
    if not all(part.is_contiguous() for part in parts):
        raise ValueError("levels, scales and zeros must be contiguous")
    num_groups = scales.shape[1]
    if num_groups > 1 and (group not in (32, 64, 128) or triton.cdiv(in_features, group) != num_groups):
        raise ValueError(f"{num_groups} groups of {group} of {in_features} inputs: they have 32, 64 or 128")


@triton.jit
def _few_rows(
    rows,  # [num_rows, in_features]
    levels,  # [out_features, in_features]
    scales,  # [out_features, num_groups]
    zeros,  # [out_features, num_groups]
    output,  # [num_rows, out_features]
    num_rows,
    out_features,
    in_features,
    num_groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
    HAS_ZEROS: tl.constexpr,
):
    dtype = rows.dtype.element_ty
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < out_features
    places = tl.arange(0, STEP)
    source = levels + column[:, None].to(tl.int64) * in_features + places[None, :]
    row_source = rows + row[:, None] * in_features + places[None, :]
    is_row = (row < num_rows)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_features, STEP):
        left = (start + places < in_features)[None, :]
        level = tl.load(source + start, mask=inside[:, None] & left, other=0.0)
        x = tl.load(row_source + start, mask=is_row & left, other=0.0)
        weight = level.to(tl.float32)
        if HAS_ZEROS:
            at = column * num_groups + (start // GROUP if GROUP else 0)
            weight -= tl.load(zeros + at, mask=inside, other=0.0)[:, None]
        part = tl.dot(x, tl.trans(weight.to(dtype)), input_precision="ieee")
        if GROUP:
            scale = tl.load(scales + column * num_groups + start // GROUP, mask=inside, other=0.0)
            total += part * scale[None, :]
        else:
            total += part
    if not GROUP:
        total *= tl.load(scales + column, mask=inside, other=0.0)[None, :]
    target = output + row[:, None] * out_features.to(tl.int64) + column[None, :]
    tl.store(target, total, mask=is_row & inside[None, :])


@triton.jit
def _write_out(
    levels,  # [out_features, in_features]
    scales,  # [out_features, num_groups]
    zeros,  # [out_features, num_groups]
    output,  # [out_features, in_features]
    out_features,
    in_features,
    num_groups,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP,
    HAS_ZEROS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)[None, :]
    inside = (row < out_features) & (place < in_features)
    at = row.to(tl.int64) * in_features + place
    level = tl.load(levels + at, mask=inside, other=0.0)
    of_group = row * num_groups + place // GROUP
    scale = tl.load(scales + of_group, mask=inside, other=0.0)
    zero = tl.load(zeros + of_group, mask=inside, other=0.0) if HAS_ZEROS else 0.0
    tl.store(output + at, (level.to(tl.float32) - zero) * scale, mask=inside)
