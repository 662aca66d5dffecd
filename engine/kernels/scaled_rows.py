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
