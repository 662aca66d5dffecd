"""Matrix products of some rows that are readings of the weight: launchers and kernel.

For up to a hundred rows a product takes as long as its weight takes to read, and cuBLAS has too few tiles of
a narrow weight to keep the memory busy. Here tiles are narrow too, and where they are still too few, programs
share their inputs (`shared_sums.py`). One H200 (4.2 TB/s), torch 2.11, triton 3.6, us; by bytes / here /
cuBLAS:

    8-bit floats, rows       32            64            128
    28,672 x 4,096      28/32/37      28/34/37      28/39/35
     4,096 x 14,336     14/19/37      14/20/37      14/24/37
     6,144 x 4,096     6.0/9.2/14    6.0/9.7/14    6.0/11/14
     4,096 x 4,096     4.0/7.9/14    4.0/8.9/14    4.0/11/14

    bfloat16, rows            2              8              32             64
     4,096 x 14,336     28/31/32       28/31/33       28/33/34       28/34/37
     6,144 x 4,096     12/15.3/15.6   12/15.5/15.7   12/15.6/16.3   12/16.6/16.3
     4,096 x 4,096    8.0/11.1/13.3  8.0/11.4/13.2  8.0/12.0/13.8  8.0/12.9/12.0
     1,024 x 3,072     1.5/5.4/6.7    1.5/5.5/7.4    1.5/6.3/7.6    1.5/8.0/7.9

One row is summed on the ordinary units, by a kernel of its own: cuBLAS takes 13.3 us for 4096 x 4096, where
one program for eight columns takes 10.9 and the bytes alone 8.0; 12.8 us for 1024 x 2048, here 4.4; and 283
us for 8 rows by a head of 128,256 x 4096, here 242 (H200, bfloat16, 2026-11-21).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.devices import shared_memory_bytes
from engine.kernels.shared_sums import NARROW, Tiles, _store_shared, room_for_parts, shared_parts

MAX_ROWS, MAX_ROWS_OF_WIDE = 128, 64
"""Numbers of 8-bit rows up to which the kernel is the faster one: with narrow weights, and with others."""

MAX_THIN_ROWS = 32
"""Number of rows up to which products of floats are faster than cuBLAS's."""

MAX_PARTS = 8
"""Number of programs that share the inputs of one tile, at most."""

PROGRAMS = 132
"""Number of programs, at most, that a narrow weight is shared out among: one for each multiprocessor."""

MIN_SHARED_MEMORY = 200_000
"""Bytes of shared memory that the loads under way need, at most: Hopper and Blackwell have 227 KiB."""


def has_room_for_loads(device: torch.device) -> bool:
    """Return whether a device is a GPU on which one program may have enough loads under way."""
    return shared_memory_bytes(device) >= MIN_SHARED_MEMORY


def is_rounded_faster(rows: torch.Tensor, levels: torch.Tensor) -> bool:
    """Return whether `rounded_product` of these is faster than `torch._scaled_mm` on their device."""
    limit = MAX_ROWS if levels.shape[0] <= NARROW else MAX_ROWS_OF_WIDE
    return rows.shape[0] <= limit and has_room_for_loads(rows.device)


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
    _require_sides(rows, row_scales, levels, scales)
    output = torch.empty((rows.shape[0], levels.shape[0]), dtype=dtype, device=rows.device)
    is_narrow = levels.shape[0] <= NARROW
    tiles = stream_tiles(levels.shape[0], 64 if is_narrow else 128, 4)
    _stream(rows, levels, (row_scales, scales), output, counters, tiles, 256 if is_narrow else 128)
    return output


def thin_product(rows: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight.T, [num_rows, out_features], summed in float32.

    Args:
        rows: [num_rows, in_features], num_rows <= MAX_THIN_ROWS, contiguous.
        weight: [out_features, in_features], contiguous, of the same dtype.
        counters: `part_counters`.

    Raises ValueError for a shape, stride or dtype that the kernels do not take."""
    num_rows, in_features = rows.shape
    if num_rows > MAX_THIN_ROWS or weight.shape[1] != in_features:
        raise ValueError(f"rows {tuple(rows.shape)} and weight {tuple(weight.shape)} do not fit")
    if rows.dtype != weight.dtype:
        raise ValueError(f"rows are {rows.dtype}, the weight {weight.dtype}")
    if not rows.is_contiguous() or not weight.is_contiguous():
        raise ValueError("rows and weight must be contiguous")
    out_features = weight.shape[0]
    output = rows.new_empty((num_rows, out_features))
    if num_rows != 1:
        is_small = out_features <= NARROW and weight.element_size() <= 2
        tiles = stream_tiles(out_features, 64, 6 if is_small else 4)
        _stream(rows, weight, None, output, counters, tiles, 128)
        return output
    columns = 4 if out_features <= 1024 else 8
    _one_row[(triton.cdiv(out_features, columns),)](
        rows, weight, output, out_features, in_features,
        COLUMNS=columns, STEP=4096 // columns, num_warps=4, **overlapping(rows.device),
    )  # fmt: skip
    return output


def stream_tiles(out_features: int, columns: int, stages: int) -> Tiles:
    """Return tiles of so many columns, with as many parts as make `PROGRAMS` programs at most."""
    return Tiles(columns, shared_parts(triton.cdiv(out_features, columns), MAX_PARTS, PROGRAMS), 4, stages)


def _stream(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    output: torch.Tensor,
    counters: torch.Tensor,
    tiles: Tiles,
    step: int,
) -> None:
    """Multiply into `output`, `step` inputs at once; `scales` are those of the rows and of the outputs."""
    num_rows, in_features = rows.shape
    out_features = weight.shape[0]
    if not num_rows:
        return
    row_scales, own_scales = scales or (output, output)
    _weight_tile[(triton.cdiv(out_features, tiles.columns), tiles.parts)](
        rows, row_scales, weight, own_scales, output, room_for_parts(output, tiles.parts), counters,
        num_rows, out_features, in_features,
        ROWS=max(16, triton.next_power_of_2(num_rows)), COLUMNS=tiles.columns, PARTS=tiles.parts, STEP=step,
        SCALED=scales is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        **overlapping(rows.device),
    )  # fmt: skip


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
def _weight_tile(
    rows,  # [num_rows, in_features]
    row_scales,  # [num_rows]
    weight,  # [out_features, in_features]
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
    SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The weight is the left side: tensor cores take 64 of its outputs at once, and any few rows beside them.
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, inside = row < num_rows, column < out_features
    places = tl.arange(0, STEP)
    source = weight + column[:, None].to(tl.int64) * in_features + places[None, :]
    row_source = rows + row[None, :] * in_features + places[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    share, num_steps = tl.program_id(1), tl.cdiv(in_features, STEP)
    _await_inputs(OVERLAPS)
    for step in range(share * num_steps // PARTS, (share + 1) * num_steps // PARTS):
        start = step * STEP
        left = start + places < in_features
        w = tl.load(source + start, mask=inside[:, None] & left[None, :], other=0.0)
        x = tl.load(row_source + start, mask=is_row[None, :] & left[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    _launch_next(OVERLAPS)
    if SCALED:
        total *= tl.load(scales + column, mask=inside, other=0.0)[:, None]
        total *= tl.load(row_scales + row, mask=is_row, other=0.0)[None, :]
    target = row[None, :].to(tl.int64) * out_features + column[:, None]
    size = num_rows * out_features.to(tl.int64)
    counter = counters + tl.program_id(0)
    _store_shared(total, target, is_row[None, :] & inside[:, None], output, partial, counter, size, PARTS)


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
