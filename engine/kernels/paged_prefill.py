"""Attention of the chunks of several sequences over their paged KV: launcher and kernel.

The chunks lie packed one after the other, of any lengths, each after a cached prefix of any length (none
too): one launch takes them all, and a sequence of one new token is a chunk like any other. The chunk's own K
and V are already in the cache, so prefix and chunk are read alike.

A program owns one KV head and a tile of consecutive tokens of one chunk; the query heads that share the KV
head are further rows of the tile, so that K and V are read once for all of them. Tiles are numbered without
knowing the lengths: chunk i begins at tile `query_starts[i] // TOKENS + i`, which allows for the rounding of
every chunk before it, and a program finds its chunk by binary search. The launch thus depends on the shapes
alone.

Keys of a few tiles are cut into parts (`key_parts.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.attention import AttentionRule
from engine.kernels.key_parts import (
    LEAST_KEYS,
    _part_of_keys,
    _write_absent,
    _write_part,
    join_parts,
    num_parts,
    part_buffers,
)
from engine.kernels.paged_layer import LOG2_E, kernel_constants, require_paged_layer
from engine.kernels.scaled_rows import SCALE_WIDTH, _mixed_with, _multiplied, _scaled


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Launch parameters that change speed and not the result (but for rounding)."""

    rows: int
    """Query rows of a program: tokens times the heads of one KV head."""
    tokens: int
    """Tokens of K and V read at a time."""
    num_warps: int
    num_stages: int
    parts: int = 0
    """Parts that the keys of a tile are cut into at most; 0: by the number of tiles."""
    least_keys: int = LEAST_KEYS
    """Number of keys of a tile for each of which it has one more part."""


PROGRAMS = 256
"""Programs with work that tiles of few tokens are cut into: two for each multiprocessor, as many as are under
way at once.

One H200, 32 heads of 128, us for whole keys / parts: 128 tokens after 8,192 166/65, after 24,576 487/168; 256
after 8,192 172/116; with twice as many programs 74 and 122."""


def prefill_tiles(group: int, row_bytes: int) -> PrefillTiles:
    """Choose a launch for `group` query heads a KV head and `row_bytes` a head of a token."""
    least = max(16, triton.next_power_of_2(group))
    if row_bytes <= 256:
        # 421 TFLOP/s at 16,384 tokens of 32 heads of 128; 128 rows on 8 warps reach 353 and
        # FlashAttention 2 reaches 345 (H200, 2026-11-21)
        return PrefillTiles(max(64, least), 64, num_warps=4, num_stages=3)
    if row_bytes <= 512:
        return PrefillTiles(max(64, least), 32, num_warps=4, num_stages=2)
    return PrefillTiles(max(32, least), 16, num_warps=4, num_stages=1)


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    tiles: PrefillTiles | None = None,
    output: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of packed chunks over their paged KV.

    Arguments and result are those of `attention.py : paged_prefill_attention`, with head_dim contiguous;
    block table entries past a sequence's last block are not read.

    Args:
        query_starts: [num_seqs + 1] int32, ascending; chunk i is tokens query_starts[i] to query_starts[i +
            1], none where both are equal.
        output: Written in the tokens of chunks alone; None allocates, with the other tokens undefined.
        scales: Those of a layer of 8 bits, [num_blocks, num_kv_heads, SCALE_WIDTH]; None: it is not scaled.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    require_paged_layer(kv_cache, query, block_tables, context_lens, scales)
    num_seqs = block_tables.shape[0]
    if query_starts.shape != (num_seqs + 1,) or query_starts.dtype != torch.int32:
        raise ValueError("query_starts must be [num_seqs + 1] int32")
    constants = kernel_constants(query, kv_cache, rule, sinks, scales)
    tiles = tiles or prefill_tiles(constants["GROUP"], constants["DIM_PAD"] * query.element_size())
    if scales is not None:
        # A tile of one block has one scale.
        tiles = replace(tiles, tokens=math.gcd(tiles.tokens, kv_cache.shape[2]))
    output = query.new_empty(query.shape) if output is None else output
    num_tokens, num_kv_heads = query.shape[0], kv_cache.shape[3]
    tile_tokens = tiles.rows // constants["GROUP"]
    num_tiles = num_tokens // tile_tokens + num_seqs
    most_keys = block_tables.shape[1] * kv_cache.shape[2]
    if rule.sliding_window:
        most_keys = min(most_keys, rule.sliding_window + tile_tokens + tiles.tokens)
    parts = tiles.parts or num_parts(num_kv_heads * -(-num_tokens // tile_tokens), PROGRAMS, most_keys)
    results, log_sums = part_buffers(parts, output)
    _prefill_tile[(num_kv_heads, num_tiles, parts)](
        query, kv_cache, query if scales is None else scales, block_tables, query_starts, context_lens,
        query if sinks is None else sinks,  # a pointer that is not read
        output, results, log_sums, num_seqs, num_tokens, rule.scale * LOG2_E.value,
        rule.soft_cap * LOG2_E.value,
        *query.stride()[:2], *kv_cache.stride()[:4], 0 if scales is None else scales.stride(0),
        block_tables.stride(0), **constants,
        ROWS=tiles.rows, TILE=tiles.tokens, PARTS=parts, LEAST_KEYS=tiles.least_keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    join_parts(results, log_sums, query_starts, output)
    return output


@triton.jit
def _chunk_of_tile(query_starts, num_seqs, tile, TOKENS: tl.constexpr):
    """Return the last chunk that begins at or before `tile`."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _seen(scores, at, query_pos, WINDOW: tl.constexpr):
    """Return scores [ROWS, TILE] without those of positions that a query does not see."""
    seen = at[None, :] <= query_pos[:, None]
    if WINDOW > 0:
        seen = seen & (at[None, :] > query_pos[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _attend_tiles(
    mixed,  # [ROWS, DIM_PAD]
    total,  # [ROWS]
    highest,  # [ROWS]
    q,  # [ROWS, DIM_PAD]
    kv_head_cache,  # [num_blocks, 2, BLOCK_SIZE, DIM]
    head_scales,  # [num_blocks, SCALE_WIDTH]
    table,  # [max_blocks]
    begin,
    end,
    query_pos,  # [ROWS]
    scale,
    soft_cap,
    block_stride,
    value_stride,
    token_stride,
    scale_stride,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take positions `begin` to `end` into the running softmax; scores are base 2."""
    dims = tl.arange(0, DIM_PAD)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)
        row = block * block_stride + (at % BLOCK_SIZE) * token_stride
        source = kv_head_cache + row[:, None] + dims[None, :]
        tile_mask = (dims < DIM)[None, :]
        if MASKED:
            tile_mask = tile_mask & (at < end)[:, None]
        k = tl.load(source, mask=tile_mask, other=0.0)  # [TILE, DIM_PAD]
        v = tl.load(source + value_stride, mask=tile_mask, other=0.0)  # [TILE, DIM_PAD]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale  # [ROWS, TILE]
        scale_at = head_scales + block * scale_stride
        scores = _scaled(scores, scale_at, SCALED)
        if SOFT_CAP:
            # scale and soft_cap carry the factor log2(e), which cancels in the quotient
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        if MASKED:
            scores = _seen(scores, at, query_pos, WINDOW)
        # a tile may hide everything from a row: keep the maximum finite
        raised = tl.maximum(highest, tl.maximum(tl.max(scores, 1), -1.0e30))
        weights = tl.exp2(scores - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None]
        mixed = _mixed_with(mixed, weights, v, q.dtype, scale_at + 1, SCALED)
        highest = raised
    return mixed, total, highest


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_tile(
    query,  # [num_tokens, num_heads, DIM]
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, DIM]
    scales,  # [num_blocks, num_kv_heads, SCALE_WIDTH]
    block_tables,  # [num_seqs, max_blocks]
    query_starts,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    sinks,  # [num_heads]
    output,  # [num_tokens, num_heads, DIM]
    results,  # [PARTS, num_tokens, num_heads, DIM]
    log_sums,  # [PARTS, num_tokens, num_heads]
    num_seqs,
    num_tokens,
    scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    scale_stride,
    table_stride,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(0)
    # a chunk's last tiles see the most: they start first, so that none is left alone at the end
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _chunk_of_tile(query_starts, num_seqs, tile, TOKENS)
    chunk_start = tl.load(query_starts + seq)
    chunk_len = tl.load(query_starts + seq + 1) - chunk_start
    first = (tile - (chunk_start // TOKENS + seq)) * TOKENS
    # tiles before the first chunk, after a chunk's end, and of chunks of padding
    if (first < 0) | (first >= chunk_len):
        return
    prefix_len = tl.load(context_lens + seq) - chunk_len
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    token = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < TOKENS * GROUP) & (token < chunk_len)
    mask = row_mask[:, None] & (dims < DIM)[None, :]
    token_at = (chunk_start + token).to(tl.int64)
    query_at = token_at * query_token_stride + heads * query_head_stride
    q = tl.load(query + query_at[:, None] + dims[None, :], mask=mask, other=0.0)
    q = _multiplied(q, SCALED)
    query_pos = prefix_len + token
    end = prefix_len + tl.minimum(first + TOKENS, chunk_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(prefix_len + first - WINDOW + 1, 0) // TILE * TILE
        whole = begin
    else:
        # every row sees all of the positions before this one
        whole = (prefix_len + first + 1) // TILE * TILE
    part = tl.program_id(2)
    row_at = token_at * (tl.num_programs(0) * GROUP) + heads
    num_rows = tl.cast(num_tokens, tl.int64) * (tl.num_programs(0) * GROUP)
    is_cut = False
    if PARTS > 1:
        begin, end, is_cut = _part_of_keys(begin, end, part, PARTS, LEAST_KEYS, TILE)
        if begin >= end:
            _write_absent(log_sums, row_at, num_rows, part, row_mask)
            return
        whole = tl.minimum(tl.maximum(whole, begin), end)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS and part == 0:
        highest = tl.load(sinks + heads, mask=rows < TOKENS * GROUP, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    head_cache = kv_cache + kv_head.to(tl.int64) * head_stride
    head_scales = scales + kv_head * SCALE_WIDTH
    table = block_tables + seq.to(tl.int64) * table_stride
    mixed, total, highest = _attend_tiles(
        mixed, total, highest, q, head_cache, head_scales, table, begin, whole, query_pos, scale, soft_cap,
        block_stride, value_stride, token_stride, scale_stride, WINDOW, SOFT_CAP, SCALED, False, DIM,
        DIM_PAD, BLOCK_SIZE, TILE,
    )  # fmt: skip
    mixed, total, highest = _attend_tiles(
        mixed, total, highest, q, head_cache, head_scales, table, whole, end, query_pos, scale, soft_cap,
        block_stride, value_stride, token_stride, scale_stride, WINDOW, SOFT_CAP, SCALED, True, DIM,
        DIM_PAD, BLOCK_SIZE, TILE,
    )  # fmt: skip
    _write_part(
        mixed, total, highest, row_at, num_rows, part, is_cut, row_mask, dims, output, results, log_sums, DIM
    )
