"""Attention of some rows of queries over the tokens of a block table, tile by tile, inside of kernels.

Each tile's scores raise the maximum of a row or not, and what was summed below the old maximum is scaled down
to the new one (online softmax), so that no score is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.paged_layer import LOG2_E
from engine.kernels.scaled_rows import SCALE_WIDTH, _load_rows, _load_values, _mixed_in_two, _scaled


@triton.jit
def _in_base_2(scores, factor, soft_cap, SOFT_CAP: tl.constexpr):
    """Return scores times `factor`, capped where the rule says so, and times log2(e)."""
    if SOFT_CAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * factor * scores / soft_cap) - 1.0)
        factor = 1.0
    return scores * (factor * LOG2_E)


@triton.jit
def _tile_at(
    table,  # [max_blocks]
    start,
    begin,
    end,
    block_stride,
    token_stride,
    BEGINS_WITHIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the block of a tile's tokens, where they lie in the cache, and which are `begin` to `end`.

    They lie at a place and at a row from there each. A token that is not of these lies where the nearest of
    these does: to mask each number takes more instructions, and what lies elsewhere may be NaN."""
    tokens = tl.arange(0, TILE)
    at = start + tokens
    seen = at < end
    if BEGINS_WITHIN or BLOCK_SIZE % TILE != 0:
        seen = seen & (at >= begin)
    if BLOCK_SIZE % TILE == 0:
        # one block, whose place is one number: the tile's own are the same in each turn
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + (start % BLOCK_SIZE) * token_stride
        row = tokens * token_stride
        if BEGINS_WITHIN:
            row = tl.maximum(row, (begin - start) * token_stride)
        row = tl.minimum(row, (end - 1 - start) * token_stride)
    else:
        near = tl.minimum(tl.maximum(at, begin), end - 1)
        block = tl.load(table + near // BLOCK_SIZE).to(tl.int64)
        place = 0
        row = block * block_stride + (near % BLOCK_SIZE) * token_stride
    return block, place, row, seen


@triton.jit
def _attend_tiles(
    mixed,  # [ROWS, DIM_PAD], or half of them where values are read in pairs
    mixed_odd,
    total,  # [ROWS]
    highest,  # [ROWS], base 2
    q,  # [ROWS, DIM_PAD]
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, DIM]
    scales,  # [num_blocks, num_kv_heads, SCALE_WIDTH]
    table,  # [max_blocks]
    begin,
    end,
    kv_head,
    scale,
    soft_cap,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    scale_stride,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    BEGINS_WITHIN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Take the tokens `begin` to `end` into what was mixed and summed; return it."""
    for start in range(begin // TILE * TILE, end, TILE):
        block, place, row, seen = _tile_at(
            table, start, begin, end, block_stride, token_stride, BEGINS_WITHIN, BLOCK_SIZE, TILE
        )
        base = kv_cache + place + kv_head * head_stride
        k = _load_rows(base, row, DIM, DIM_PAD)
        v = _load_values(base + value_stride, row, DIM, DIM_PAD, SCALED)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [GROUP_PAD, TILE]
        scale_at = scales + block * scale_stride + kv_head * SCALE_WIDTH
        scores = _in_base_2(scores, _scaled(scale, scale_at, SCALED), soft_cap, SOFT_CAP)
        # every tile holds a position that is seen, so the maximum is finite
        scores = tl.where(seen[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed, mixed_odd = _mixed_in_two(
            mixed * kept[:, None], mixed_odd * kept[:, None], weights.to(q.dtype), v, scale_at + 1,
            SCALED, ON_DEVICE,
        )  # fmt: skip
        highest = raised
    return mixed, mixed_odd, total, highest
