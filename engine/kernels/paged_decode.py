"""Attention of one new token per sequence over its paged KV: launcher and kernel.

A program owns one KV head of one of the equal parts into which all contexts are cut (`decode_parts.py`), and
attends to the pieces of sequences in it one after the other; a second kernel joins sequences of several
pieces. The query heads that share the KV head are the rows of one matrix product, padded to the 16 rows that
a tensor core takes: K and V are read once for all of them, and reading is all that costs.

The new token's K and V may be handed in instead of lying in the cache: the program that owns the last piece
writes them there and takes them from its registers, which saves a launch for each layer.

The launch follows from shapes alone, never from the lengths, and is the same at each replay of a CUDA graph;
a program whose part is empty returns at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.attention import AttentionRule
from engine.kernels.decode_parts import (
    UNIT,
    KernelPrograms,
    _first_read,
    _part_of,
    _pieces_of,
    _sequence_of,
    count_of,
    count_parts,
    decode_parts,
)
from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.paged_layer import kernel_constants, require_new_rows, require_paged_layer
from engine.kernels.scaled_rows import (
    SCALE_WIDTH,
    _load_rows,
    _load_values,
    _mixed_in_two,
    _multiplied,
    _scaled,
    _stored,
)

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E); the device has exp2 as one instruction."""

PROGRAMS = KernelPrograms(4, 3)
"""Programs for each multiprocessor, as found on an H200."""

SCALED_PROGRAMS = KernelPrograms(8, 6)
"""Programs for each multiprocessor whose tiles are of one warp."""

FEW_HEADS = 128
"""KV heads of all sequences up to which a step takes as long as one program with its part."""


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
    # One H200, 8 heads of 128. 256 sequences of 1,090 tokens: 282 us with two warps, 333 with four. Few
    # sequences wait for one program's tiles: with half the tokens of each and five stages 1, 4 and 8 of them
    # take 0.94, 0.83 and 0.92 of the time, and heads of 64 with one warp 0.79 and 0.82. Of 8 bits, whose
    # block's number and scale are read first, many small tiles are under way soon enough: 64 sequences of 500
    # to 24,000 tokens take 423 us with one warp and five stages, with four 496, with two warps 557. Heads of
    # 256 want two warps always: 55 us against 97.
    if row_bytes <= 256 and is_scaled:
        return DecodeTiles(tokens // 2, num_warps=1, num_stages=5)
    if row_bytes <= 256 and heads <= FEW_HEADS:
        return DecodeTiles(tokens // 2, num_warps=max(1, row_bytes // 128), num_stages=5)
    return DecodeTiles(tokens, num_warps=2, num_stages=5 if is_scaled else 3)


def decode_programs(row_bytes: int, is_scaled: bool = False) -> KernelPrograms:
    """Return the numbers of programs among which contexts are divided.

    Args:
        row_bytes: Bytes of one head of one token as computed.
        is_scaled: Whether KV heads are of 8 bits.
    """
    return SCALED_PROGRAMS if is_scaled and row_bytes <= 256 else PROGRAMS


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
        parts: A row of `decode_parts`, for the rule's window, not by the last kernel; None: made here.
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
    if parts is None:
        counts = count_parts(num_kv_heads, decode_programs(row_bytes, scales is not None), query.device)
        parts = decode_parts(context_lens, counts, (rule.sliding_window,))[0]
    count = count_of(parts, num_seqs)
    partial = output.new_empty((2 * count, num_heads, head_dim), dtype=torch.float32)
    log_sums = output.new_empty((2 * count, num_heads), dtype=torch.float32)
    key, value = added or (query, query)
    if added is not None:
        require_new_rows(kv_cache, key, value, scales)
    _decode_part[(num_kv_heads, count)](
        query, key, value, kv_cache, query if scales is None else scales, block_tables, context_lens,
        parts, num_seqs, query if sinks is None else sinks, output, partial, log_sums, rule.scale,
        rule.soft_cap, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:4],
        0 if scales is None else scales.stride(0), block_tables.stride(0), **constants, TILE=tiles.tokens,
        ADDED=added is not None, GROUP_PAD=max(16, triton.next_power_of_2(constants["GROUP"])),
        ON_DEVICE=query.is_cuda,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **overlap,
    )  # fmt: skip
    join_pieces(partial, log_sums, parts, output, sinks, **overlapping(query.device))
    return output


def join_pieces(
    partial: torch.Tensor,
    log_sums: torch.Tensor,
    parts: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
    **overlap: bool,
) -> None:
    """Write the attention of sequences of several pieces to `output`, and zeros of those of none.

    Args:
        partial, log_sums: As the kernels write them, [2 * count, num_heads, dim] and [2 * count, num_heads].
        parts: A row of `decode_parts`.
        output: [num_seqs, num_heads, dim], contiguous.
        overlap: Options of the launch."""
    num_seqs, num_heads, dim = output.shape
    dim_pad = triton.next_power_of_2(dim)
    width, rows, grid = join_grid(num_heads, dim_pad, num_seqs)
    _join_pieces[grid](
        partial, log_sums, parts, partial.shape[0] // 2, num_heads, log_sums if sinks is None else sinks,
        output, SINKS=sinks is not None, DIM=dim, DIM_PAD=dim_pad, WIDTH=width, ROWS=rows, **overlap,
    )  # fmt: skip


def join_grid(num_heads: int, dim_pad: int, num_seqs: int) -> tuple[int, int, tuple[int, int]]:
    """Return how `_join_pieces` goes about its work.

    Most of many sequences are one piece, and 2,048 programs that find nothing to join take 9 us.

    Returns:
        The numbers of a head that are a row; the rows of a program; and the programs.
    """
    width = min(dim_pad, 128)
    num_rows = num_heads * dim_pad // width
    rows = triton.next_power_of_2(-(-num_rows // max(1, 512 // num_seqs)))
    return width, rows, (-(-num_rows // rows), num_seqs)


@triton.jit
def _with_sinks(mixed, total, highest, sinks, mask, SINKS: tl.constexpr):
    """Take the sink of each head into what was mixed and summed below 2 ** `highest`."""
    if SINKS:
        sink = tl.load(sinks, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        raised = tl.maximum(highest, sink)
        kept = tl.exp2(highest - raised)
        mixed = mixed * kept[:, None]
        total = total * kept + tl.exp2(sink - raised)
    return mixed, total


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
def _decode_part(
    query,  # [num_seqs, num_heads, DIM]
    key,  # [num_seqs, num_kv_heads, DIM], of the new tokens
    value,
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, DIM]
    scales,  # [num_blocks, num_kv_heads, SCALE_WIDTH]
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    parts,  # [2 * count + 1 + 3 * num_seqs]
    num_seqs,
    sinks,  # [num_heads]
    output,  # [num_seqs, num_heads, DIM]; written of sequences that are one piece
    partial,  # [2 * count, num_heads, DIM]; written of the others: of each part what began before, and in it
    log_sums,  # [2 * count, num_heads], base 2
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
    ON_DEVICE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # What a step is made of lies there since before the last kernel: it is read while that one ends.
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    num_heads = tl.num_programs(0) * GROUP
    at_unit, end_unit, seq = _part_of(parts, part, count)
    first_unit, length = _sequence_of(parts, context_lens, seq, count, num_seqs)
    _await_inputs(OVERLAPS)
    BEGINS_WITHIN: tl.constexpr = WINDOW > 0 or TILE > UNIT  # a piece may begin within a tile
    MIXED: tl.constexpr = DIM_PAD // 2 if SCALED else DIM_PAD
    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    heads = kv_head * GROUP + rows
    head_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    while at_unit < end_unit:
        first = _first_read(length, WINDOW)
        begin = first + (at_unit - first_unit) * UNIT
        stop = tl.minimum(first + (end_unit - first_unit) * UNIT, length)
        is_first = at_unit == first_unit
        is_there = length > 0
        seq_at = seq.to(tl.int64)
        query_at = seq_at * query_seq_stride + heads[:, None] * query_head_stride + dims[None, :]
        q = tl.load(query + query_at, mask=head_mask, other=0.0)  # [GROUP_PAD, DIM_PAD]
        q = _multiplied(q, SCALED)
        highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        mixed = tl.zeros([GROUP_PAD, MIXED], tl.float32)
        mixed_odd = tl.zeros([GROUP_PAD, MIXED], tl.float32)
        table = block_tables + seq_at * table_stride
        end = stop
        if ADDED:  # noqa: SIM102 one of the two is known to the compiler
            # A new token is taken first, from where it is, and the loop ends before it.
            if is_there & (stop == length):
                new = (length - 1).to(tl.int64)
                block = tl.load(table + new // BLOCK_SIZE).to(tl.int64)
                target = block * block_stride + (new % BLOCK_SIZE) * token_stride + kv_head * head_stride
                target = kv_cache + target + dims
                inside = dims < DIM
                k_new = tl.load(
                    key + seq_at * key_seq_stride + kv_head * key_head_stride + dims, mask=inside, other=0.0
                )
                v_new = tl.load(
                    value + seq_at * value_seq_stride + kv_head * value_head_stride + dims,
                    mask=inside,
                    other=0.0,
                )
                scale_at = scales + block * scale_stride + kv_head * SCALE_WIDTH
                begins = new % BLOCK_SIZE == 0
                k_new = _stored(target, k_new, inside, scale_at, begins, SCALED)
                v_new = _stored(target + value_stride, v_new, inside, scale_at + 1, begins, SCALED)
                score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1)
                highest = _in_base_2(score, scale, soft_cap, SOFT_CAP)
                total += 1.0
                v_new = v_new.to(tl.float32)
                if SCALED:
                    v_new, v_odd = tl.split(tl.reshape(v_new, [MIXED, 2]))
                    mixed_odd += v_odd[None, :]
                mixed += v_new[None, :]
                end = stop * 0 if WINDOW == 1 else stop - 1  # a tile of which nothing is seen is not read
        if WINDOW > 0:
            begin = tl.maximum(begin, length - WINDOW)
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
        if SCALED:
            mixed = tl.interleave(mixed, mixed_odd)
        at_unit = first_unit + tl.cdiv(length - first, UNIT)
        if at_unit >= end_unit:
            _launch_next(OVERLAPS)
        total = tl.where(total > 0.0, total, 1.0)  # of padding, of which nothing is written
        if is_first & (stop == length):
            mixed, total = _with_sinks(mixed, total, highest, sinks + heads, rows < GROUP, SINKS)
            if is_there:
                slot = seq_at * num_heads + heads
                mixed = mixed / total[:, None]
                tl.store(output + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)
        else:
            slot = (2 * part + is_first.to(tl.int32)).to(tl.int64) * num_heads + heads
            tl.store(log_sums + slot, highest + tl.log2(total), mask=rows < GROUP)
            mixed = mixed / total[:, None]
            tl.store(partial + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)
        seq += 1
        first_unit, length = _sequence_of(parts, context_lens, seq, count, num_seqs)


@triton.jit
def _join_pieces(
    partial,  # [2 * count, num_heads, DIM]
    log_sums,  # [2 * count, num_heads], base 2
    parts,  # [2 * count + 1 + 3 * num_seqs]
    count,
    num_heads,
    sinks,  # [num_heads]
    output,  # [num_seqs, num_heads, DIM]
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    seq = tl.program_id(1)
    first_part, num_pieces = _pieces_of(parts, seq, count, tl.num_programs(1))
    AT_ONCE: tl.constexpr = max(1, 32 // ROWS)  # pieces that registers have space for
    pieces = tl.arange(0, AT_ONCE)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    heads = rows * WIDTH // DIM_PAD
    is_head = heads < num_heads
    dims = (rows * WIDTH % DIM_PAD)[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = is_head[:, None] & (dims < DIM)
    _await_inputs(OVERLAPS)
    if num_pieces == 1:
        return
    highest = tl.full([ROWS], -1.0e30, tl.float32)  # finite for a row of padding too
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        highest = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in range(0, num_pieces, AT_ONCE):
        piece = begin + pieces
        slot = 2 * (first_part + piece) + (piece == 0).to(tl.int32)
        at = slot.to(tl.int64)[None, :] * num_heads + heads[:, None]
        is_there = (piece < num_pieces)[None, :] & is_head[:, None]
        log_sum = tl.load(log_sums + at, mask=is_there, other=float("-inf"))  # [ROWS, AT_ONCE]
        source = partial + at[:, :, None] * DIM + dims[:, None, :]
        found = tl.load(source, mask=is_there[:, :, None] & mask[:, None, :], other=0.0)
        raised = tl.maximum(highest, tl.max(log_sum, 1))
        weights = tl.exp2(log_sum - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.sum(found * weights[:, :, None], 1)
        highest = raised
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    output_at = (seq.to(tl.int64) * num_heads + heads)[:, None] * DIM + dims
    tl.store(output + output_at, mixed, mask=mask)
