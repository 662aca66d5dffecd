"""Matrix products of some rows and a weight, both of 8-bit floats: launcher and kernel.

For up to a hundred rows a product is a reading of the weight, and cuBLAS has too few tiles of a narrow one to
keep the memory busy. Here tiles are narrow too, and where they are still too few, programs share their inputs
(`shared_sums.py`). One H200 (4.2 TB/s), torch 2.11, triton 3.6, us; by bytes / here / `torch._scaled_mm`:

    rows                      32            64            128
    28,672 x 4,096      28/32/37      28/34/37      28/39/35
     4,096 x 14,336     14/19/37      14/20/37      14/24/37
     6,144 x 4,096     6.0/9.2/14    6.0/9.7/14    6.0/11/14
     4,096 x 4,096     4.0/7.9/14    4.0/8.9/14    4.0/11/14
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.shared_sums import PART_TILES, _store_shared, room_for_parts

NARROW = 8192
"""Number of outputs of a narrow weight, at most."""

MAX_ROWS, MAX_ROWS_OF_WIDE = 128, 64
"""Numbers of rows up to which the kernel is the faster one: with narrow weights, and with others."""

BUSY = 96
"""Number of programs from which a GPU's memory is busy; of 132 multiprocessors."""

MIN_SHARED_MEMORY = 200_000
"""Bytes of shared memory that the loads under way need, at most: Hopper and Blackwell have 227 KiB."""


def is_rounded_faster(rows: torch.Tensor, levels: torch.Tensor) -> bool:
    """Return whether `rounded_product` of these is faster than `torch._scaled_mm` on their device."""
    limit = MAX_ROWS if levels.shape[0] <= NARROW else MAX_ROWS_OF_WIDE
    if rows.shape[0] > limit or not rows.is_cuda:
        return False
    device = torch.cuda.get_device_properties(rows.device)
    return int(device.shared_memory_per_block_optin) >= MIN_SHARED_MEMORY  # type: ignore[attr-defined]


def rounded_product(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    counters: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (rows * row_scales) @ (levels * scales).T, [num_rows, out_features] `dtype`, summed in float32.

    Args:
        rows, row_scales: [num_rows, in_features] float8_e4m3fn and [num_rows, 1], as `round_rows` returns
            them; num_rows <= MAX_ROWS.
        levels, scales: [out_features, in_features] float8_e4m3fn and [out_features, 1], contiguous.
        counters: `part_counters`.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_rows, in_features = rows.shape
    out_features = levels.shape[0]
    _require_sides(rows, row_scales, levels, scales)
    output = torch.empty((num_rows, out_features), dtype=dtype, device=rows.device)
    if not num_rows:
        return output
    is_narrow = out_features <= NARROW
    columns = 64 if is_narrow else 128
    num_tiles = triton.cdiv(out_features, columns)
    parts = min(8, triton.next_power_of_2(triton.cdiv(BUSY, num_tiles))) if num_tiles <= PART_TILES else 1
    _rounded_rows[(num_tiles, parts)](
        rows, row_scales, levels, scales, output, room_for_parts(output, parts), counters,
        num_rows, out_features, in_features,
        ROWS=max(16, triton.next_power_of_2(num_rows)), COLUMNS=columns, PARTS=parts,
        STEP=256 if is_narrow else 128, num_warps=4, num_stages=4,
    )  # fmt: skip
    return output


def _require_sides(
    rows: torch.Tensor, row_scales: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor
) -> None:
    for name, part in (("rows", rows), ("levels", levels)):
        if part.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} are {part.dtype}, not float8_e4m3fn")
    if levels.shape[1] != rows.shape[1]:
        raise ValueError(f"levels {tuple(levels.shape)} do not fit {rows.shape[1]} inputs")
    if row_scales.numel() != rows.shape[0] or scales.numel() != levels.shape[0]:
        raise ValueError("every row and every output has one scale")
    if rows.shape[0] > MAX_ROWS:
        raise ValueError(f"{rows.shape[0]} rows; they are {MAX_ROWS} at most")
    if not all(part.is_contiguous() for part in (rows, row_scales, levels, scales)):
        raise ValueError("rows, levels and scales must be contiguous")


@triton.jit
def _rounded_rows(
    rows,  # [num_rows, in_features]
    row_scales,  # [num_rows]
    levels,  # [out_features, in_features]
    scales,  # [out_features]
    output,  # [num_rows, out_features]
    partial,  # [PARTS, num_rows, out_features]
    counters,  # [tiles]
    num_rows,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
):
    # The weight is the left side: tensor cores take 64 of its outputs at once, and any few rows beside them.
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, inside = row < num_rows, column < out_features
    places = tl.arange(0, STEP)
    source = levels + column[:, None].to(tl.int64) * in_features + places[None, :]
    row_source = rows + row[None, :] * in_features + places[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    share, num_steps = tl.program_id(1), tl.cdiv(in_features, STEP)
    for step in range(share * num_steps // PARTS, (share + 1) * num_steps // PARTS):
        start = step * STEP
        left = start + places < in_features
        level = tl.load(source + start, mask=inside[:, None] & left[None, :], other=0.0)
        x = tl.load(row_source + start, mask=is_row[None, :] & left[:, None], other=0.0)
        total = tl.dot(level, x, total)
    total *= tl.load(scales + column, mask=inside, other=0.0)[:, None]
    total *= tl.load(row_scales + row, mask=is_row, other=0.0)[None, :]
    target = row[None, :].to(tl.int64) * out_features + column[:, None]
    size = num_rows * out_features.to(tl.int64)
    counter = counters + tl.program_id(0)
    _store_shared(total, target, is_row[None, :] & inside[:, None], output, partial, counter, size, PARTS)
