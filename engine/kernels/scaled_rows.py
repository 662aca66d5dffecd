"""Numbers of 8 bits and their scales (`engine/scaled_kv.py`), inside of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from engine import scaled_kv

SCALE_WIDTH = tl.constexpr(scaled_kv.SCALE_WIDTH)
LARGEST = tl.constexpr(scaled_kv.LARGEST)
HIGHEST_EXPONENT = tl.constexpr(scaled_kv.HIGHEST_EXPONENT)


@triton.jit
def _scale_of(rows):
    """Return the scale for blocks that begin with one of `rows` [num_rows, DIM], [num_rows]."""
    largest = tl.max(tl.abs(rows.to(tl.float32)), 1)
    exponent = tl.minimum(largest.to(tl.int32, bitcast=True) >> 23, HIGHEST_EXPONENT)
    return tl.where(exponent > 0, (exponent << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _to_scaled(rows, scale, cache):
    """Return `rows` over their scale in the dtype of what `cache` points to, too large numbers cut off."""
    numbers = rows.to(tl.float32) / scale
    return tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST).to(cache.dtype.scalar.element_ty)


@triton.jit
def _stored(target, row, inside, scale_at, begins, SCALED: tl.constexpr):
    """Store a token's row [DIM], and its scale where a block begins; return the numbers that others read."""
    if SCALED:
        if begins:
            scale = tl.max(_scale_of(row[None, :]), 0)
            tl.store(scale_at, scale)
        else:
            scale = tl.load(scale_at)
        numbers = _to_scaled(row, scale, target)
        tl.store(target, numbers, mask=inside)
        row = numbers.to(tl.float32) * scale
    else:
        tl.store(target, row, mask=inside)
    return row


@triton.jit
def _multiplied(rows, SCALED: tl.constexpr):
    """Return queries in the dtype that they are multiplied in: 8 bits become float16 in one instruction."""
    if SCALED and rows.dtype == tl.bfloat16:
        rows = rows.to(tl.float16)
    return rows


@triton.jit
def _mixed_with(mixed, weights, values, DTYPE: tl.constexpr, scale_at, SCALED: tl.constexpr):
    """Return `mixed` and the weighted values of one block, times their scale, if they have one."""
    weights, values = weights.to(DTYPE), values.to(DTYPE)
    if SCALED:
        mixed += tl.dot(weights, values, input_precision="ieee") * tl.load(scale_at)
    else:
        mixed = tl.dot(weights, values, mixed, input_precision="ieee")
    return mixed


@triton.jit
def _scaled(product, scale_at, SCALED: tl.constexpr):
    """Return a product of one block's numbers times their scale, if they have one."""
    if SCALED:
        product = product * tl.load(scale_at)
    return product


@triton.jit
def _load_rows(source, row, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Return rows that begin at `row` [rows] of `source`, [rows, DIM_PAD], zeros behind DIM."""
    dims = tl.arange(0, DIM_PAD)[None, :]
    if DIM == DIM_PAD:
        rows = tl.load(source + (row[:, None] + dims))
    else:
        rows = tl.load(source + (row[:, None] + dims), mask=dims < DIM, other=0.0)
    return rows


@triton.jit
def _load_values(source, row, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SCALED: tl.constexpr):
    """Return rows as `_load_rows` does; of 8 bits two numbers in one, [rows, DIM_PAD // 2] int16.

    Values are multiplied along their tokens, across the bytes of a row. A device transposes 16 bits at once
    as it reads them, and single bytes one by one."""
    if SCALED:
        rows = _load_rows(source.to(tl.pointer_type(tl.int16)), row // 2, DIM // 2, DIM_PAD // 2)
    else:
        rows = _load_rows(source, row, DIM, DIM_PAD)
    return rows


@triton.jit
def _in_two(pairs, DTYPE: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Return the numbers of 8 bits in the low and in the high bytes of `pairs`, each of the shape of them."""
    if ON_DEVICE and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return low, high


@triton.jit
def _mixed_in_two(evens, odds, weights, values, scale_at, SCALED: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Return sums [rows, dims] with weighted values added, which are as `_load_values` loads them.

    Values of 8 bits have two sums, of those in even places and of those in odd ones; others have one, and
    `odds` is returned as it is."""
    if SCALED:
        low, high = _in_two(values, weights.dtype, ON_DEVICE)
        scale = tl.load(scale_at)
        evens += tl.dot(weights, low, input_precision="ieee") * scale
        odds += tl.dot(weights, high, input_precision="ieee") * scale
    else:
        evens = tl.dot(weights, values.to(weights.dtype), evens, input_precision="ieee")
    return evens, odds
