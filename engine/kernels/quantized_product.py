"""Matrix products by weights of 8 bits: launchers and kernels.

A product of a few rows is a reading of the weight: the kernel reads its levels, turns them into the rows'
dtype beside the tensor cores, and multiplies the sums of each group by its scale. For many rows the weight is
written out once, by a kernel of its own, and cuBLAS multiplies.

One H100 (3.0 TB/s), torch 2.11, triton 3.6; bfloat16 / this kernel on int8 / `torch._scaled_mm` on fp8:

    rows                       1      16     32     64     256
    28,672 x 4,096, us   79/46/54  84/48/50  86/75/49  88/92/51  104/236/59
    4,096 x 14,336, us   43/37/37  45/38/37  46/44/37  48/63/37   60/127/38

Up to 16 rows, programs share the inputs of a narrow weight (`shared_sums.py`). One H200, fp8, us at 8 rows
with one program for each tile of outputs, and with eight:

    6,144 x 4,096   13.6/12.2
    4,096 x 4,096   10.6/9.4
    4,096 x 14,336  29.9/22.0

Levels of four bits have a kernel of their own (`nibble_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.shared_sums import PART_TILES, Tiles, _store_shared, room_for_parts

MAX_ROWS = 64
"""Number of rows that the kernel takes."""

STEP = 128
"""Inputs that a program takes at once, at most."""

FEW = 16
"""Number of rows up to which programs have more outputs, and share the inputs of a narrow weight."""

NARROW = 8192
"""Outputs up to which too few programs would be busy, each with all inputs."""


def quantized_tiles(num_rows: int, out_features: int) -> Tiles:
    """Return the tiles of a product; up to `FEW` rows they were the fastest of 48 on one H200."""
    if num_rows > FEW:
        return Tiles(32, 1, 4, 6)
    return Tiles(64, 8, 4, 3) if out_features <= NARROW else Tiles(64, 1, 4, 4)


def few_rows_product(
    rows: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    counters: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return rows @ weight.T, [num_rows, out_features], summed in float32.

    Args:
        rows: [num_rows, in_features], num_rows <= MAX_ROWS, contiguous.
        levels, scales, zeros, group: As `QuantizedWeight` has them, contiguous.
        counters: `part_counters`.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_rows, in_features = rows.shape
    _require_weight(in_features, levels, scales, zeros, group)
    if num_rows > MAX_ROWS or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous, and {MAX_ROWS} at most")
    out_features, num_groups = scales.shape
    output = rows.new_empty((num_rows, out_features))
    if not num_rows:
        return output
    tiles = tiles or quantized_tiles(num_rows, out_features)
    num_tiles = triton.cdiv(out_features, tiles.columns)
    parts = tiles.parts if num_tiles <= PART_TILES else 1
    _few_rows[(num_tiles, parts)](
        rows, levels, scales, scales if zeros is None else zeros,
        output, room_for_parts(output, parts), counters, num_rows, out_features, in_features, num_groups,
        ROWS=max(16, triton.next_power_of_2(num_rows)), COLUMNS=tiles.columns, PARTS=parts,
        STEP=min(STEP, group) if num_groups > 1 else STEP, GROUP=group if num_groups > 1 else 0,
        HAS_ZEROS=zeros is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        **overlapping(rows.device),
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
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros {tuple(zeros.shape)} are not as scales {tuple(scales.shape)}")
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
    partial,  # [PARTS, num_rows, out_features]
    counters,  # [tiles]
    num_rows,
    out_features,
    in_features,
    num_groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
    HAS_ZEROS: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
    share, num_steps = tl.program_id(1), tl.cdiv(in_features, STEP)
    _await_inputs(OVERLAPS)
    for step in range(share * num_steps // PARTS, (share + 1) * num_steps // PARTS):
        start = step * STEP
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
    _launch_next(OVERLAPS)
    if not GROUP:
        total *= tl.load(scales + column, mask=inside, other=0.0)[None, :]
    target = row[:, None] * out_features.to(tl.int64) + column[None, :]
    size = num_rows * out_features.to(tl.int64)
    counter = counters + tl.program_id(0)
    _store_shared(total, target, is_row & inside[None, :], output, partial, counter, size, PARTS)


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
