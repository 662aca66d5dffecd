"""Attention of one new token per sequence over its paged KV: launcher and kernel.

A program owns one KV head of one part of a sequence's context (`decode_parts.py`), so that a single long
sequence still fills the device; a second kernel joins the parts of those that have several. The query heads
that share the KV head are the rows of one matrix product, padded to the 16 rows that a tensor core takes: K
and V are read once for all of them, and reading is all that costs.

The new token's K and V may be handed in instead of lying in the cache: the program that owns the last part
writes them there and takes them from its registers, which saves a launch for each layer.

The launch follows from shapes alone, never from the lengths, and is the same at each replay of a CUDA graph;
a program without a part returns at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.attention import AttentionRule
from engine.kernels.decode_parts import FEW_HEADS, MAX_SPLITS, decode_parts
from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.paged_layer import kernel_constants, require_new_rows, require_paged_layer
from engine.kernels.scaled_rows import SCALE_WIDTH, _multiplied, _scaled, _stored

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E); the device has exp2 as one instruction."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Launch parameters that change speed and not the result (but for rounding)."""

    tokens: int
    num_warps: int
    num_stages: int


def decode_tiles(row_bytes: int, heads: int, is_scaled: bool = False) -> DecodeTiles:
    """Choose a launch.

    Args:
        row_bytes: Bytes of one head of one token as computed, padded to a power of two.
        heads: KV heads of all sequences.
        is_scaled: Whether they are of 8 bits.
    """
    tokens = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    # One H200, 8 heads of 128, contexts of 1,090 tokens. 256 sequences: 282 us with two warps, 333 with four.
    # Of 8 bits, whose block's number and scale are read first, the loads of five stages are under way soon
    # enough: 150 us, of four 176. With one warp and half the tokens 96 sequences take 73 us, with two 95; of
    # 64 sequences 70, with two 53. Heads of 256 want two warps always: 55 us against 97. Few sequences wait
    # for one program's tiles: with half the tokens of each and five stages 1, 4 and 8 sequences take 0.94,
    # 0.83 and 0.92 of the time, and heads of 64 with one warp 0.79 and 0.82.
    if not is_scaled:
        if heads <= FEW_HEADS and row_bytes <= 256:
            return DecodeTiles(tokens // 2, num_warps=max(1, row_bytes // 128), num_stages=5)
        return DecodeTiles(tokens, num_warps=2, num_stages=3)
    if heads >= 768 and row_bytes <= 256:
        return DecodeTiles(tokens // 2, num_warps=1, num_stages=5)
    return DecodeTiles(tokens, num_warps=2, num_stages=5)


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    tiles: DecodeTiles | None = None,
    output: torch.Tensor | None = None,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
    parts: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one new token per sequence over its paged KV.

    Arguments and result are those of `attention.py : paged_decode_attention`, with head_dim contiguous; no
    table is read past a sequence's last block, and a context of 0 is padding, whose output is zeros.

    Args:
        output: Written; None allocates.
        added: K and V of the new tokens, each [num_seqs, num_kv_heads, head_dim]; they are written to the
            cache. None: they are there already.
        parts: `decode_parts` of the lengths and KV heads, not by the last kernel; None: made here.
        scales: Those of a layer of 8 bits, [num_blocks, num_kv_heads, SCALE_WIDTH]; None: it is not scaled.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    require_paged_layer(kv_cache, query, block_tables, context_lens, scales)
    num_seqs, num_heads, head_dim = query.shape
    if block_tables.shape[0] != num_seqs:
        raise ValueError(f"{num_seqs} queries, {block_tables.shape[0]} block tables")
    num_kv_heads = kv_cache.shape[3]
    constants = kernel_constants(query, kv_cache, rule, sinks, scales)
    row_bytes = constants["DIM_PAD"] * query.element_size()
    tiles = tiles or decode_tiles(row_bytes, num_seqs * num_kv_heads, scales is not None)
    if scales is not None:  # a tile of one block has one scale
        tiles = replace(tiles, tokens=math.gcd(tiles.tokens, kv_cache.shape[2]))
    output = query.new_empty(query.shape) if output is None else output
    overlap = {"OVERLAPS": False} if parts is None else overlapping(query.device)
    parts = decode_parts(context_lens, num_kv_heads) if parts is None else parts
    num_items = parts.shape[0] - 2 * num_seqs
    partial = output.new_empty((num_items, num_heads, head_dim), dtype=torch.float32)
    log_sums = output.new_empty((num_items, num_heads), dtype=torch.float32)
    sinks = query if sinks is None else sinks  # a pointer that is not read
    key, value = added or (query, query)
    if added is not None:
        require_new_rows(kv_cache, key, value, scales)
    _decode_part[(num_kv_heads, num_items)](
        query, key, value, kv_cache, query if scales is None else scales, block_tables, context_lens,
        parts, num_items, sinks, output, partial, log_sums, rule.scale, rule.soft_cap,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:4],
        0 if scales is None else scales.stride(0), block_tables.stride(0), **constants, TILE=tiles.tokens,
        ADDED=added is not None, GROUP_PAD=max(16, triton.next_power_of_2(constants["GROUP"])),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **overlap,
    )  # fmt: skip
    _join_parts[join_grid(num_heads, num_seqs)](
        partial, log_sums, context_lens, parts, num_items, num_heads, sinks, output,
        WINDOW=rule.sliding_window, SINKS=constants["SINKS"],
        DIM=head_dim, DIM_PAD=constants["DIM_PAD"], TILE=tiles.tokens, **overlapping(query.device),
    )  # fmt: skip
    return output


def join_grid(num_heads: int, num_seqs: int) -> tuple[int, int]:
    """Return the programs of `_join_parts`: a head each, or of many sequences, which are one part, several.

    2,048 programs that find nothing to join take 9 us."""
    return max(1, min(num_heads, 512 // num_seqs)), num_seqs


@triton.jit
def _part_span(length, count, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return where the reading begins, and the length of each of `count` parts; TILE divides both."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return first, tl.cdiv(tl.cdiv(length - first, count), TILE) * TILE


@triton.jit
def _decode_part(
    query,  # [num_seqs, num_heads, DIM]
    key,  # [num_seqs, num_kv_heads, DIM], of the new tokens
    value,
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, DIM]
    scales,  # [num_blocks, num_kv_heads, SCALE_WIDTH]
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    parts,  # [num_items + 2 * num_seqs]
    num_items,
    sinks,  # [num_heads]
    output,  # [num_seqs, num_heads, DIM]; written of sequences that are one part
    partial,  # [num_items, num_heads, DIM]; written of the others
    log_sums,  # [num_items, num_heads], base 2
    scale,
    soft_cap,
    query_seq_stride,
    query_head_stride,
    key_seq_stride,
    key_head_stride,
    value_seq_stride,
    value_head_stride,
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
    ADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # What a step is made of lies there since before the last kernel: it is read while that one ends.
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    part = tl.load(parts + item)
    seq = (tl.maximum(part, 0) // MAX_SPLITS).to(tl.int64)
    count = tl.load(parts + num_items + seq)
    length = tl.load(context_lens + seq)
    first, span = _part_span(length, tl.maximum(count, 1), WINDOW, TILE)
    begin = first + part % MAX_SPLITS * span
    end = tl.minimum(begin + span, length)
    is_last = end == length
    _await_inputs(OVERLAPS)
    if part < 0:
        return
    if begin >= end:
        return
    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    tokens = tl.arange(0, TILE)
    heads = kv_head * GROUP + rows
    head_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    query_at = seq * query_seq_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query + query_at, mask=head_mask, other=0.0)  # [GROUP_PAD, DIM_PAD]
    q = _multiplied(q, SCALED)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    table = block_tables + seq * table_stride
    if ADDED:  # noqa: SIM102 one of the two is known to the compiler
        # A new token is taken first, from where it is, and the loop ends before it.
        if is_last:
            new = (length - 1).to(tl.int64)
            block = tl.load(table + new // BLOCK_SIZE).to(tl.int64)
            target = block * block_stride + (new % BLOCK_SIZE) * token_stride + kv_head * head_stride
            target = kv_cache + target + dims
            inside = dims < DIM
            k_new = tl.load(
                key + seq * key_seq_stride + kv_head * key_head_stride + dims, mask=inside, other=0.0
            )
            v_new = tl.load(
                value + seq * value_seq_stride + kv_head * value_head_stride + dims, mask=inside, other=0.0
            )
            scale_at = scales + block * scale_stride + kv_head * SCALE_WIDTH
            begins = new % BLOCK_SIZE == 0
            k_new = _stored(target, k_new, inside, scale_at, begins, SCALED)
            v_new = _stored(target + value_stride, v_new, inside, scale_at + 1, begins, SCALED)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
            if SOFT_CAP:
                score = soft_cap * (2.0 * tl.sigmoid(2.0 * score / soft_cap) - 1.0)
            highest = score * LOG2_E
            total += 1.0
            mixed += v_new.to(tl.float32)[None, :]
            end = end - 1
    for start in range(begin, end, TILE):
        at = start + tokens
        seen = at < end
        if BLOCK_SIZE % TILE == 0:
            # one block, whose place is one number: the tile's own are the same in each turn
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            row = tokens * token_stride
            base = kv_cache + block * block_stride + (start % BLOCK_SIZE) * token_stride
        else:
            block = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            row = block * block_stride + (at % BLOCK_SIZE) * token_stride
            base = kv_cache
        source = base + kv_head * head_stride + (row[:, None] + dims[None, :])
        tile_mask = seen[:, None] & (dims < DIM)[None, :]
        k = tl.load(source, mask=tile_mask, other=0.0)  # [TILE, DIM_PAD]
        v = tl.load(source + value_stride, mask=tile_mask, other=0.0)  # [TILE, DIM_PAD]
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale  # [GROUP_PAD, TILE]
        scale_at = scales + block * scale_stride + kv_head * SCALE_WIDTH
        scores = _scaled(scores, scale_at, SCALED)
        if SOFT_CAP:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        if WINDOW > 0:
            seen = seen & (at >= length - WINDOW)
        # every tile holds a position that is seen, so the maximum is finite
        scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        product = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        mixed = mixed * kept[:, None] + _scaled(product, scale_at + 1, SCALED)
        highest = raised
    _launch_next(OVERLAPS)
    num_heads = tl.num_programs(0) * GROUP
    if count > 1:
        slot = item.to(tl.int64) * num_heads + heads
        tl.store(log_sums + slot, highest + tl.log2(total), mask=rows < GROUP)
        mixed = mixed / total[:, None]
        tl.store(partial + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)
    else:
        if SINKS:
            sink = tl.load(sinks + heads, mask=rows < GROUP, other=0.0).to(tl.float32) * LOG2_E
            raised = tl.maximum(highest, sink)
            kept = tl.exp2(highest - raised)
            mixed = mixed * kept[:, None]
            total = total * kept + tl.exp2(sink - raised)
        mixed = mixed / total[:, None]
        slot = seq * num_heads + heads
        tl.store(output + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)


@triton.jit
def _join_parts(
    partial,  # [num_items, num_heads, DIM]
    log_sums,  # [num_items, num_heads], base 2
    context_lens,  # [num_seqs]
    parts,  # [num_items + 2 * num_seqs]
    num_items,
    num_heads,
    sinks,  # [num_heads]
    output,  # [num_seqs, num_heads, DIM]
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    seq = tl.program_id(1).to(tl.int64)
    count = tl.load(parts + num_items + seq)
    length = tl.load(context_lens + seq)
    first, span = _part_span(length, tl.maximum(count, 1), WINDOW, TILE)
    AT_ONCE: tl.constexpr = min(MAX_SPLITS, max(4, 4096 // DIM_PAD))  # parts that registers have room for
    splits = tl.arange(0, AT_ONCE)
    dims = tl.arange(0, DIM_PAD)
    first_item = tl.load(parts + num_items + tl.num_programs(1) + seq).to(tl.int64)
    _await_inputs(OVERLAPS)
    if count == 1:
        return
    for head in range(tl.program_id(0), num_heads, tl.num_programs(0)):
        highest = tl.cast(-1.0e30, tl.float32)  # finite for a row of padding too
        total = tl.cast(0.0, tl.float32)
        if SINKS:
            highest = tl.load(sinks + head).to(tl.float32) * LOG2_E
            total = tl.cast(1.0, tl.float32)
        mixed = tl.zeros([DIM_PAD], tl.float32)
        for begin in range(0, count, AT_ONCE):
            split = begin + splits
            # parts with nothing to do wrote nothing
            wrote = (split < count) & (first + split * span < length)
            at = (first_item + split) * num_heads + head
            log_sum = tl.load(log_sums + at, mask=wrote, other=float("-inf"))
            source = partial + at[:, None] * DIM + dims[None, :]
            part = tl.load(source, mask=wrote[:, None] & (dims < DIM)[None, :], other=0.0)
            raised = tl.maximum(highest, tl.max(log_sum, 0))
            weights = tl.exp2(log_sum - raised)
            kept = tl.exp2(highest - raised)
            total = total * kept + tl.sum(weights, 0)
            mixed = mixed * kept + tl.sum(part * weights[:, None], 0)
            highest = raised
        mixed = mixed / tl.where(total > 0, total, 1.0)
        tl.store(output + (seq * num_heads + head) * DIM + dims, mixed, mask=dims < DIM)
