"""Matrix products by weights of four bits, as `nibbles.py` lays them out: launchers and kernels.

A product of a few rows is a reading of the weight. Four bits become a number of 16 bits by one permutation
of bytes: 128, or 1,024 of a float16, and a number below 16 are a number whose last digits that one is. What
was added, and the zero point, is taken off again, and tensor cores multiply. A narrow weight has its inputs
shared out among programs (`shared_sums.py`). Past `SUMMED` rows the weight is multiplied by its scales, as
where it is written out; for more than `MAX_ROWS` it is, once, and cuBLAS multiplies.

One H200, torch 2.11, triton 3.6, us at 8, 16 and 64 rows; bfloat16 by cuBLAS / this kernel:

    28,672 x 4,096   62/21  61/33  66/50
    4,096 x 14,336   36/12  34/20  39/30
    4,096 x 4,096    14/7   14/9   13/12

One H100, at 128 and 256 rows; the same / written out and multiplied:

    28,672 x 4,096   91/66/205  105/129/220
    4,096 x 14,336   54/40/112  60/68/116
    6,144 x 4,096    22/27/45   24/43/50
    4,096 x 4,096    15/19/28   19/35/34

One row takes as long as eight: multiplying it where the levels are unpacked, without tensor cores, took 32,
19 and 7 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.devices import HOPPER, NATIVE, capability
from engine.kernels.shared_sums import NARROW, PART_TILES, Tiles, _store_shared, room_for_parts, shared_parts
from engine.nibbles import Nibbles

MAX_ROWS = 256
"""Number of rows that the kernels take, and up to which they are faster than to write the weight out."""

SUMMED = 64
"""Number of rows up to which sums are multiplied by the scales, and not the weight."""

_HALVES = """
{{
.reg .b32 low, high;
and.b32 low, $4, 0x0f0f0f0f;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, {base}, 0x4140;
prmt.b32 $1, low, {base}, 0x4342;
prmt.b32 $2, high, {base}, 0x4140;
prmt.b32 $3, high, {base}, 0x4342;
sub.rn.{kind} $0, $0, $5;
sub.rn.{kind} $1, $1, $6;
sub.rn.{kind} $2, $2, $5;
sub.rn.{kind} $3, $3, $6;
}}
"""
BFLOAT_HALVES = tl.constexpr(_HALVES.format(base="0x43434343", kind="bf16x2"))
FLOAT_HALVES = tl.constexpr(_HALVES.format(base="0x64646464", kind="f16x2"))


def can_take_nibbles(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels take rows of a dtype on a device: GPUs subtract bfloat16 from Hopper on."""
    if device.type != "cuda" or dtype == torch.float16:
        return True
    return dtype == torch.bfloat16 and capability(device) >= HOPPER


def nibble_tiles(num_rows: int, out_features: int) -> Tiles:
    """Return the tiles of a product that were the fastest on one H200."""
    is_narrow = out_features <= NARROW
    if num_rows <= 8:
        return Tiles(32, 8, 1, 4) if is_narrow else Tiles(64, 2, 2, 4)
    if num_rows > SUMMED:
        height = 128 if num_rows <= 128 else 256
        num_tiles = triton.cdiv(out_features, 128) * triton.cdiv(num_rows, height)
        return Tiles(128, shared_parts(num_tiles, 4, 132), 8, 3, height)
    if is_narrow:
        return Tiles(64, 8 if num_rows <= 16 else 4, 4, 3)
    return Tiles(128, 2 if num_rows <= 16 else 1, 4, 3)


def nibble_product(
    rows: torch.Tensor, weight: Nibbles, counters: torch.Tensor, tiles: Tiles | None = None
) -> torch.Tensor:
    """Return rows @ weight.T, [num_rows, out_features], summed in float32.

    Args:
        rows: [num_rows, in_features], num_rows <= MAX_ROWS, contiguous; on a GPU of 16 bits.
        counters: `part_counters`.

    Raises ValueError for rows that the kernels do not take."""
    num_rows, in_features = rows.shape
    num_units, out_features, half = weight.levels.shape
    if num_rows > MAX_ROWS or not rows.is_contiguous() or in_features != weight.in_features:
        raise ValueError(f"rows must be contiguous, of {weight.in_features} numbers, and {MAX_ROWS} at most")
    if rows.is_cuda and rows.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rows of {rows.dtype}: products by four bits are of 16 bits")
    output = rows.new_empty((num_rows, out_features))
    if not num_rows:
        return output
    tiles = tiles or nibble_tiles(num_rows, out_features)
    num_tiles = triton.cdiv(out_features, tiles.columns)
    sizes = num_rows, out_features, in_features, num_units, weight.units_per_group
    height = tiles.rows or max(8, triton.next_power_of_2(num_rows))
    row_tiles = triton.cdiv(num_rows, height)
    parts = min(tiles.parts, num_units) if num_tiles * row_tiles <= PART_TILES else 1
    _row_tile[(num_tiles, parts, row_tiles)](
        rows, weight.levels, weight.grid, output, room_for_parts(output, parts), counters, *sizes,
        HALF=half, ROWS=height, COLUMNS=tiles.columns, PARTS=parts, EVEN=in_features % (2 * half) == 0,
        SUMS=num_rows <= SUMMED, num_warps=tiles.warps, num_stages=tiles.stages,
        **overlapping(rows.device),
    )  # fmt: skip
    return output


def written_out_nibbles(weight: Nibbles, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, [out_features, in_features] `dtype`."""
    num_units, out_features, half = weight.levels.shape
    output = torch.empty((out_features, weight.in_features), dtype=dtype, device=weight.levels.device)
    _write_out[(triton.cdiv(out_features, 16), num_units)](
        weight.levels, weight.grid, output,
        out_features, weight.in_features, weight.units_per_group, HALF=half, COLUMNS=16, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _scale_and_zero(packed):
    """Return the scales and the zero points, float32, that lie in words of `Nibbles.grid`."""
    return (packed & -32).to(tl.float32, bitcast=True), (packed & 31).to(tl.float32)


@triton.jit
def _halves(levels, zeros, dtype: tl.constexpr):
    """Return the numbers in the lower and the upper halves of bytes, less zeros [COLUMNS]."""
    zeros = zeros[:, None]
    if NATIVE:
        if dtype == tl.bfloat16:
            offset = tl.broadcast_to((zeros + 128.0).to(tl.bfloat16), levels.shape)
            return tl.inline_asm_elementwise(
                BFLOAT_HALVES,
                "=r,=r,=r,=r,r,r,r",
                [levels, offset],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:  # noqa: RET505 the compiler wants both
            offset = tl.broadcast_to((zeros + 1024.0).to(tl.float16), levels.shape)
            return tl.inline_asm_elementwise(
                FLOAT_HALVES,
                "=r,=r,=r,=r,r,r,r",
                [levels, offset],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
    return ((levels & 15).to(tl.float32) - zeros).to(dtype), ((levels >> 4).to(tl.float32) - zeros).to(dtype)


@triton.jit
def _row_tile(
    rows,  # [num_rows, in_features]
    levels,  # [num_units, out_features, HALF]
    grid,  # [num_groups, out_features]
    output,  # [num_rows, out_features]
    partial,  # [PARTS, num_rows, out_features]
    counters,  # [tiles]
    num_rows,
    out_features,
    in_features,
    num_units,
    units_per_group,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,  # all units are whole
    SUMS: tl.constexpr,  # sums are multiplied by scales
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Past the last output the last is read again, which takes no mask in the loop.
    near = tl.minimum(column, out_features - 1)
    part = tl.program_id(1)
    is_row = (row < num_rows)[None, :]
    place = tl.arange(0, HALF)
    source = levels + near.to(tl.int64)[:, None] * HALF + place[None, :]
    row_source = rows + row[None, :] * in_features + place[:, None]
    unit_bytes = out_features.to(tl.int64) * HALF
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    _await_inputs(OVERLAPS)
    for unit in range(part * num_units // PARTS, (part + 1) * num_units // PARTS):
        at = unit * (2 * HALF)
        of_group = unit // units_per_group * out_features + near
        level = tl.load(source + unit * unit_bytes)
        scale, zero = _scale_and_zero(tl.load(grid + of_group))
        if EVEN:
            x_low = tl.load(row_source + at, mask=is_row, other=0.0)
            x_high = tl.load(row_source + at + HALF, mask=is_row, other=0.0)
        else:
            inside = in_features - at - place[:, None]
            x_low = tl.load(row_source + at, mask=is_row & (inside > 0), other=0.0)
            x_high = tl.load(row_source + at + HALF, mask=is_row & (inside > HALF), other=0.0)
        low, high = _halves(level, zero, rows.dtype.element_ty)
        if SUMS:
            sums = tl.dot(low, x_low, input_precision="ieee")
            sums = tl.dot(high, x_high, sums, input_precision="ieee")
            total += sums * scale[:, None]
        else:
            scale = scale.to(rows.dtype.element_ty)[:, None]
            total = tl.dot(low * scale, x_low, total, input_precision="ieee")
            total = tl.dot(high * scale, x_high, total, input_precision="ieee")
    _launch_next(OVERLAPS)
    target = row[None, :] * out_features.to(tl.int64) + column[:, None]
    mask = is_row & (column < out_features)[:, None]
    size = num_rows * out_features.to(tl.int64)
    counter = counters + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    _store_shared(total, target, mask, output, partial, counter, size, PARTS)


@triton.jit
def _write_out(
    levels,  # [num_units, out_features, HALF]
    grid,  # [num_groups, out_features]
    output,  # [out_features, in_features]
    out_features,
    in_features,
    units_per_group,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    unit = tl.program_id(1).to(tl.int64)
    inside = (column < out_features)[:, None]
    place = tl.arange(0, HALF)[None, :]
    level = tl.load(levels + (unit * out_features + column[:, None]) * HALF + place, mask=inside, other=0)
    of_group = unit // units_per_group * out_features + column
    scale, zero = _scale_and_zero(tl.load(grid + of_group, mask=column < out_features, other=0)[:, None])
    at = unit * (2 * HALF) + place
    target = output + column[:, None].to(tl.int64) * in_features + at
    low, high = (level & 15).to(tl.float32), (level >> 4).to(tl.float32)
    tl.store(target, (low - zero) * scale, mask=inside & (at < in_features))
    tl.store(target + HALF, (high - zero) * scale, mask=inside & (at + HALF < in_features))
