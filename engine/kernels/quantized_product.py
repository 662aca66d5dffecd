"""Matrix products by weights of 8 bits: launchers and kernels.

A product of a few rows is a reading of the weight: the kernel reads its levels, turns them into the rows'
dtype beside the tensor cores, and multiplies the sums of each group by its scale. Past `FEW` rows the weight
is the left side, which tensor cores take from registers; past `SUMMED` the scales of groups are multiplied
into it. For more rows the weight is written out, by a kernel of its own, and cuBLAS multiplies.

One H100 (3.0 TB/s), torch 2.11, triton 3.6, us of the four products of a layer of 28,672 x 4,096, 4,096 x
14,336, 6,144 x 4,096 and 4,096 x 4,096; cuBLAS takes 170 to 209 by bfloat16:

    rows                                 24    64   128   256   512
    int8, a scale for each output       124   144   181   303
    8-bit floats in groups of 128       131   168   226   340
    written out and multiplied          423   427   435   460   542

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
from engine.kernels.devices import HOPPER, NATIVE, capability
from engine.kernels.shared_sums import NARROW, PART_TILES, Tiles, _store_shared, room_for_parts, shared_parts
from engine.quantized_weight import GROUPS

MAX_ROWS = 256
"""Number of rows that the kernels take, and up to which they are faster than to write the weight out."""

SUMMED = 128
"""Number of rows up to which sums are multiplied by the scales of groups, and not the weight."""

FLOAT_ROWS = 32
"""Rows of a program where they are of 4 bytes."""

STEP = 128
"""Inputs that a program takes at once, at most."""

FEW = 16
"""Number of rows up to which the weight is the right side of the product.

With the weight on the left a product by 8-bit floats in groups took 0.99 to 1.13 of the time for 8 and 16
rows, and by int8 0.93 to 0.95 for 8 rows and 1.06 to 1.10 for 16 (one H100)."""

WRITTEN = 4096
"""Numbers of a weight that a program writes out."""


BYTES = tl.constexpr("""
{
.reg .b32 bits, sign, low, high;
and.b32 bits, $2, 0x7f7f7f7f;
and.b32 sign, $2, 0x80808080;
prmt.b32 $0, bits, 0x43434343, 0x4140;
prmt.b32 $1, bits, 0x43434343, 0x4342;
prmt.b32 low, sign, 0x43434343, 0x4140;
prmt.b32 high, sign, 0x43434343, 0x4342;
sub.rn.bf16x2 $0, $0, low;
sub.rn.bf16x2 $1, $1, high;
}
""")
"""Four whole numbers of 8 bits as bfloat16. Behind the byte 0x43 the lower seven bits are 128 more than they
are, and the sign alone is 128 or 256, which is taken off: exact, and a third of what converting takes."""


def quantized_tiles(num_rows: int, out_features: int, row_bytes: int = 2) -> Tiles:
    """Return the tiles of a product; `row_bytes` are those of a number of a row.

    Up to `FEW` rows they were the fastest of 48 on one H200, for more those of 30 on one H100."""
    if num_rows <= FEW:
        return Tiles(64, 8, 4, 3) if out_features <= NARROW else Tiles(64, 1, 4, 4)
    if row_bytes > 2:
        return Tiles(64, 1, 4, 2, FLOAT_ROWS)
    if num_rows <= SUMMED:
        parts = shared_parts(triton.cdiv(out_features, 64), 4, 264)
        return Tiles(64, parts, 4, 3, max(32, triton.next_power_of_2(num_rows)))
    num_tiles = triton.cdiv(out_features, 128) * triton.cdiv(num_rows, 256)
    return Tiles(128, shared_parts(num_tiles, 4, 132), 8, 3, 256)


def levels_product(
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

    Raises ValueError for a shape, stride or dtype that the kernels do not take."""
    num_rows, in_features = rows.shape
    _require_weight(in_features, levels, scales, zeros, group)
    if num_rows > MAX_ROWS or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous, and {MAX_ROWS} at most")
    out_features, num_groups = scales.shape
    output = rows.new_empty((num_rows, out_features))
    if not num_rows:
        return output
    tiles = tiles or quantized_tiles(num_rows, out_features, rows.element_size())
    num_tiles = triton.cdiv(out_features, tiles.columns)
    row_tiles = triton.cdiv(num_rows, tiles.rows) if tiles.rows else 1
    parts = tiles.parts if num_tiles * row_tiles <= PART_TILES else 1
    step = min(STEP, group) if num_groups > 1 else STEP
    sides = rows, levels, scales, scales if zeros is None else zeros
    sizes = num_rows, out_features, in_features, num_groups
    shared = {
        "COLUMNS": tiles.columns, "PARTS": parts, "STEP": step, "GROUP": group if num_groups > 1 else 0,
        "HAS_ZEROS": zeros is not None, "num_warps": tiles.warps, "num_stages": tiles.stages,
        **overlapping(rows.device),
    }  # fmt: skip
    partial = room_for_parts(output, parts)
    if tiles.rows:
        _row_tile[(num_tiles, parts, row_tiles)](
            *sides, output, partial, counters, *sizes, ROWS=tiles.rows, EVEN=in_features % step == 0,
            # GPUs subtract bfloat16 from Hopper on.
            BITS=rows.dtype == torch.bfloat16 and capability(rows.device) >= HOPPER,
            SUMS=num_rows <= SUMMED, **shared,
        )  # fmt: skip
    else:
        height = max(16, triton.next_power_of_2(num_rows))
        _few_rows[(num_tiles, parts)](*sides, output, partial, counters, *sizes, ROWS=height, **shared)
    return output


def written_out(
    levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight, [out_features, in_features] `dtype`; arguments as for `levels_product`."""
    in_features = levels.shape[1]
    _require_weight(in_features, levels, scales, zeros, group)
    out_features, num_groups = scales.shape
    output = torch.empty((out_features, in_features), dtype=dtype, device=levels.device)
    step = group if num_groups > 1 else 256
    _write_out[(triton.cdiv(out_features, WRITTEN // step), triton.cdiv(in_features, step))](
        levels, scales, scales if zeros is None else zeros, output, out_features, in_features, num_groups,
        ROWS=WRITTEN // step, STEP=step, GROUPED=num_groups > 1, HAS_ZEROS=zeros is not None, num_warps=4,
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
    if num_groups > 1 and (group not in GROUPS or triton.cdiv(in_features, group) != num_groups):
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
def _floats(level, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return levels as numbers of a dtype; BITS: the dtype is bfloat16, on a GPU that subtracts it."""
    if NATIVE:  # noqa: SIM102 one of the two is known to the compiler
        if BITS and level.dtype == tl.int8:
            return tl.inline_asm_elementwise(
                BYTES, "=r,=r,r", [level], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    return level.to(dtype)


@triton.jit
def _row_tile(
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
    EVEN: tl.constexpr,  # all steps are whole
    BITS: tl.constexpr,
    SUMS: tl.constexpr,  # sums are multiplied by scales of groups
    OVERLAPS: tl.constexpr,
):
    dtype = rows.dtype.element_ty
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    near = tl.minimum(column, out_features - 1)  # the last one is read again: no mask in the loop
    is_row = (row < num_rows)[None, :]
    places, part, num_steps = tl.arange(0, STEP), tl.program_id(1), tl.cdiv(in_features, STEP)
    source = levels + near[:, None].to(tl.int64) * in_features + places[None, :]
    row_source = rows + row[None, :] * in_features + places[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    _await_inputs(OVERLAPS)
    for start in range(part * num_steps // PARTS * STEP, (part + 1) * num_steps // PARTS * STEP, STEP):
        if EVEN:
            level = tl.load(source + start)
            x = tl.load(row_source + start, mask=is_row, other=0.0)
        else:
            left = start + places < in_features
            level = tl.load(source + start, mask=left[None, :], other=0.0)
            x = tl.load(row_source + start, mask=is_row & left[:, None], other=0.0)
        at = near * num_groups + (start // GROUP if GROUP else 0)
        weight = _floats(level, dtype, BITS)
        if HAS_ZEROS:
            weight = (weight.to(tl.float32) - tl.load(zeros + at)[:, None]).to(dtype)
        if GROUP and not SUMS:
            weight *= tl.load(scales + at).to(dtype)[:, None]
        if GROUP and SUMS:
            total += tl.dot(weight, x, input_precision="ieee") * tl.load(scales + at)[:, None]
        else:
            total = tl.dot(weight, x, total, input_precision="ieee")
    _launch_next(OVERLAPS)
    if not GROUP:
        total *= tl.load(scales + near)[:, None]
    wide = out_features.to(tl.int64)
    counter = counters + tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    _store_shared(
        total, row[None, :] * wide + column[:, None], is_row & (column < out_features)[:, None],
        output, partial, counter, num_rows * wide, PARTS,
    )  # fmt: skip


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
    GROUPED: tl.constexpr,  # a step is a group
    HAS_ZEROS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)[None, :]
    inside = row < out_features
    mask = inside[:, None] & (place < in_features)
    at = row[:, None].to(tl.int64) * in_features + place
    of_group = row * num_groups + (tl.program_id(1) if GROUPED else 0)
    level = tl.load(levels + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        level -= tl.load(zeros + of_group, mask=inside, other=0.0)[:, None]
    tl.store(output + at, level * tl.load(scales + of_group, mask=inside, other=0.0)[:, None], mask=mask)
