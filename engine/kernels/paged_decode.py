"""Attention of one new token per sequence over its paged KV: launcher and kernel.

A program owns one KV head of one of the equal parts into which all contexts are cut (`decode_parts.py`), and
attends to the pieces of sequences in it one after the other; a second kernel joins sequences of several
pieces. The query heads that share the KV head are the rows of one matrix product, padded to the 16 rows that
a tensor core takes: K and V are read once for all of them, and reading is all that costs.

Those rows are not all taken where few query heads share a KV head. So sequences that begin with the same
blocks may be a group (`engine/prefix_groups.py`), whose queries are the rows together: what they share is
read once for as many as rows have space for.

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
from engine.kernels.attend_tiles import _attend_tiles, _in_base_2
from engine.kernels.decode_parts import (
    UNIT,
    KernelPrograms,
    _first_read,
    _group_slot,
    _own_slot,
    _part_of,
    _sequence_of,
    _shared_units,
    count_of,
    count_parts,
    decode_parts,
)
from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping
from engine.kernels.join_pieces import join_pieces, piece_buffers
from engine.kernels.paged_layer import LOG2_E, kernel_constants, require_new_rows, require_paged_layer
from engine.kernels.scaled_rows import (
    SCALE_WIDTH,
    _multiplied,
    _stored,
)
from engine.prefix_groups import MOST_MEMBERS

PROGRAMS = KernelPrograms(4, 3)
"""Programs for each multiprocessor, as found on an H200."""

SCALED_PROGRAMS = KernelPrograms(8, 6)
"""Programs for each multiprocessor whose tiles are of one warp."""

ROWS = tl.constexpr(16)
"""Rows of a matrix product, at least: those of a tensor core. With 32 of them for groups steps are as fast
with KV of 16 bits, and slower of 8."""

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


def most_members(num_heads: int, num_kv_heads: int) -> int:
    """Return how many sequences that share a prefix are read for at once; 1: none together."""
    rows: int = ROWS.value
    return min(MOST_MEMBERS, max(1, rows // (num_heads // num_kv_heads)))


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
    groups: torch.Tensor | None = None,
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
        groups: Those that `parts` were made with; the rule has no window. None: nobody shares.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    require_paged_layer(kv_cache, query, block_tables, context_lens, scales)
    num_seqs, num_heads, num_kv_heads = *query.shape[:2], kv_cache.shape[3]
    if block_tables.shape[0] != num_seqs:
        raise ValueError(f"{num_seqs} queries, {block_tables.shape[0]} block tables")
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
    members = 1 if groups is None else most_members(num_heads, num_kv_heads)
    partial, log_sums = piece_buffers(output, parts, members)
    key, value = added or (query, query)
    if added is not None:
        require_new_rows(kv_cache, key, value, scales)
    _decode_part[(num_kv_heads, count_of(parts, num_seqs))](
        query, key, value, kv_cache, query if scales is None else scales, block_tables, context_lens,
        parts, parts if groups is None else groups, num_seqs, query if sinks is None else sinks, output,
        partial, log_sums, rule.scale, rule.soft_cap, *query.stride()[:2], *key.stride()[:2],
        *value.stride()[:2], *kv_cache.stride()[:4], 0 if scales is None else scales.stride(0),
        block_tables.stride(0), **constants, TILE=tiles.tokens, ADDED=added is not None,
        GROUP_PAD=max(ROWS.value, triton.next_power_of_2(constants["GROUP"])), MEMBERS=members,
        ON_DEVICE=query.is_cuda, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **overlap,
    )  # fmt: skip
    join_pieces(partial, log_sums, parts, output, sinks, **overlapping(query.device))
    return output


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
def _decode_part(
    query,  # [num_seqs, num_heads, DIM]
    key,  # [num_seqs, num_kv_heads, DIM], of the new tokens
    value,
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, num_kv_heads, DIM]
    scales,  # [num_blocks, num_kv_heads, SCALE_WIDTH]
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    parts,  # [2 * count + 2 + 5 * num_seqs]
    groups,  # [NUM_FIELDS, num_seqs]
    num_seqs,
    sinks,  # [num_heads]
    output,  # [num_seqs, num_heads, DIM]; written of sequences that are one piece
    partial,  # [num_slots, num_heads, DIM]; written of the others
    log_sums,  # [num_slots, num_heads], base 2
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
    MEMBERS: tl.constexpr,
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
    first = _read_from(groups, seq, num_seqs, length, WINDOW, MEMBERS)
    BEGINS_WITHIN: tl.constexpr = WINDOW > 0 or TILE > UNIT  # a piece may begin within a tile
    MIXED: tl.constexpr = DIM_PAD // 2 if SCALED else DIM_PAD
    dims = tl.arange(0, DIM_PAD)
    if MEMBERS > 1:  # noqa: SIM102 one of the two is known to the compiler
        if at_unit < _shared_units(parts, count):
            _decode_groups(
                query, kv_cache, scales, block_tables, parts, groups, num_seqs, partial, log_sums, scale,
                soft_cap, query_seq_stride, query_head_stride, block_stride, value_stride, token_stride,
                head_stride, scale_stride, table_stride, at_unit, end_unit, seq, SOFT_CAP, SCALED, GROUP,
                DIM, DIM_PAD, BLOCK_SIZE, TILE, ON_DEVICE, OVERLAPS,
            )  # fmt: skip
            end_unit = at_unit
    _await_inputs(OVERLAPS)
    rows = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + rows
    head_mask = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    while at_unit < end_unit:
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
        mixed, mixed_odd, total, highest = _attend_tiles(
            mixed, mixed_odd, total, highest, q, kv_cache, scales, table, begin, end, kv_head, scale,
            soft_cap, block_stride, value_stride, token_stride, head_stride, scale_stride, SOFT_CAP, SCALED,
            BEGINS_WITHIN, DIM, DIM_PAD, BLOCK_SIZE, TILE, ON_DEVICE,
        )  # fmt: skip
        if SCALED:
            mixed = tl.interleave(mixed, mixed_odd)
        at_unit = first_unit + tl.cdiv(length - first, UNIT)
        if at_unit >= end_unit:
            _launch_next(OVERLAPS)
        total = tl.where(total > 0.0, total, 1.0)  # of padding, of which nothing is written
        if is_first & (stop == length) & (WINDOW > 0 or first == 0):
            mixed, total = _with_sinks(mixed, total, highest, sinks + heads, rows < GROUP, SINKS)
            if is_there:
                slot = seq_at * num_heads + heads
                mixed = mixed / total[:, None]
                tl.store(output + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)
        else:
            slot = _own_slot(parts, seq, part, count, num_seqs) * num_heads + heads
            tl.store(log_sums + slot, highest + tl.log2(total), mask=rows < GROUP)
            mixed = mixed / total[:, None]
            tl.store(partial + slot[:, None] * DIM + dims[None, :], mixed, mask=head_mask)
        seq += 1
        first_unit, length = _sequence_of(parts, context_lens, seq, count, num_seqs)
        first = _read_from(groups, seq, num_seqs, length, WINDOW, MEMBERS)


@triton.jit
def _read_from(groups, seq, num_seqs, length, WINDOW: tl.constexpr, MEMBERS: tl.constexpr):
    """Return the first token of what a sequence reads for itself."""
    first = _first_read(length, WINDOW)
    if MEMBERS > 1:
        first = tl.load(groups + tl.minimum(seq, num_seqs - 1))
    return first


@triton.jit
def _decode_groups(
    query,  # as those of `_decode_part`
    kv_cache,
    scales,
    block_tables,
    parts,
    groups,
    num_seqs,
    partial,
    log_sums,
    scale,
    soft_cap,
    query_seq_stride,
    query_head_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    scale_stride,
    table_stride,
    at_unit,
    end_unit,
    group,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend to what groups share, from the unit `at_unit` of `group` to `end_unit`, for all members."""
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    count = tl.num_programs(1)
    num_heads = tl.num_programs(0) * GROUP
    MIXED: tl.constexpr = DIM_PAD // 2 if SCALED else DIM_PAD
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    member = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    _await_inputs(OVERLAPS)
    while at_unit < end_unit:
        first_unit = tl.load(groups + 2 * num_seqs + group)
        last_unit = tl.load(groups + 3 * num_seqs + group)
        size = tl.load(groups + 4 * num_seqs + group)
        is_row = member < size
        seqs = tl.load(groups + (5 + member) * num_seqs + group, mask=is_row, other=0).to(tl.int64)
        leader = tl.load(groups + 5 * num_seqs + group).to(tl.int64)
        head_mask = is_row[:, None] & (dims < DIM)[None, :]
        query_at = seqs[:, None] * query_seq_stride + heads[:, None] * query_head_stride + dims[None, :]
        q = tl.load(query + query_at, mask=head_mask, other=0.0)  # [ROWS, DIM_PAD]
        q = _multiplied(q, SCALED)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, MIXED], tl.float32)
        mixed_odd = tl.zeros([ROWS, MIXED], tl.float32)
        stop = tl.minimum(end_unit, last_unit)
        mixed, mixed_odd, total, highest = _attend_tiles(
            mixed, mixed_odd, total, highest, q, kv_cache, scales, block_tables + leader * table_stride,
            (at_unit - first_unit) * UNIT, (stop - first_unit) * UNIT, kv_head, scale, soft_cap, block_stride,
            value_stride, token_stride, head_stride, scale_stride, SOFT_CAP, SCALED, TILE > UNIT, DIM,
            DIM_PAD, BLOCK_SIZE, TILE, ON_DEVICE,
        )  # fmt: skip
        if SCALED:
            mixed = tl.interleave(mixed, mixed_odd)
        slot = _group_slot(parts, seqs, part, count, num_seqs, is_row) * num_heads + heads
        tl.store(log_sums + slot, highest + tl.log2(total), mask=is_row)
        tl.store(partial + slot[:, None] * DIM + dims[None, :], mixed / total[:, None], mask=head_mask)
        at_unit = stop
        group += 1
    _launch_next(OVERLAPS)
