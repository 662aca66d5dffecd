"""Attention over paged latents, absorbed (`engine/latent_attention.py`): launchers and kernels.

All query heads attend to one head, whose K is a latent and a rotary key and whose V is the latent again: what
a tile reads once serves both products and all heads. So a program takes as many heads as are rows of a matrix
product, and reads little for what it computes.

Two kernels: one new token per sequence, in equal parts of all contexts as `paged_decode.py`, and chunks, in
tiles as `paged_prefill.py` numbers them. Both launch by shapes alone. Chunks of some length are not absorbed
(`expanded_latents.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.decode_parts import (
    UNIT,
    KernelPrograms,
    _own_slot,
    _part_of,
    _sequence_of,
    count_of,
    count_parts,
    decode_parts,
)
from engine.kernels.devices import shared_memory_bytes
from engine.kernels.expanded_latents import LEAST_TOKENS, Latents, _has_place, seqs_pad
from engine.kernels.expanded_latents import TILE as STEP
from engine.kernels.join_pieces import join_pieces, piece_buffers
from engine.kernels.key_parts import (
    LEAST_KEYS,
    _part_of_keys,
    _write_absent,
    _write_part,
    join_parts,
    num_parts,
    part_buffers,
)
from engine.kernels.paged_layer import LOG2_E
from engine.kernels.paged_prefill import _chunk_of_tile


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Launch parameters that change speed and not the result (but for rounding)."""

    heads: int
    """Query heads of a program at most."""
    rows: int
    """Query rows of a program of chunks: tokens times heads."""
    tokens: int
    """Tokens read at a time."""
    num_warps: int
    num_stages: int
    parts: int = 0
    """Parts that the keys of a tile of chunks are cut into at most; 0: by the number of tiles."""
    least_keys: int = LEAST_KEYS
    """Number of keys of a tile for each of which it has one more part."""


DECODE_TILES = LatentTiles(heads=16, rows=16, tokens=64, num_warps=8, num_stages=2)
DEEP_STAGES = 5
"""Stages of the same where the device's shared memory has room for three tiles, which are then under way."""
DECODE_PROGRAMS = KernelPrograms(1, 1)
"""Programs for each multiprocessor.

One H200, 16 heads, latents of 512, contexts of 1,090 tokens: 64 sequences take 38 us, with 512 programs, four
warps and two stages 49; 256 sequences 103 and 125; one sequence of 32,000 tokens 47 and 66."""
CHUNK_TILES = LatentTiles(heads=64, rows=64, tokens=64, num_warps=8, num_stages=1)
SMALL_CHUNK_TILES = LatentTiles(heads=16, rows=16, tokens=32, num_warps=4, num_stages=1)
CHUNK_TILE_NUMBERS = 100 * 1024
"""Numbers of DeepSeek's that CHUNK_TILES has in shared memory, before Hopper; small tiles have 41 Ki."""
CHUNK_PROGRAMS = 132
"""Programs with work that tiles of chunks of few tokens are cut into, as many as are under way at once.

One H200, 16 heads, us for whole keys / parts: 128 tokens after 4,096 277/107, after 16,384 1,143/363; 256
after 16,384 1,173/699, with twice as many parts 743."""


def head_groups(num_heads: int, tiles: LatentTiles = DECODE_TILES) -> int:
    """Return the number of groups that heads are divided into, each of which reads all latents."""
    return -(-num_heads // tiles.heads)


def decode_tiles(layer: Latents) -> LatentTiles:
    """Choose a launch for the latents and rotary keys of a layer, on the device where they are."""
    row_bytes = sum(triton.next_power_of_2(field.shape[3]) * field.element_size() for field in layer)
    if 3 * DECODE_TILES.tokens * row_bytes > shared_memory_bytes(layer[0].device):
        return DECODE_TILES
    return replace(DECODE_TILES, num_stages=DEEP_STAGES)


def chunk_tiles(number_bytes: int, shared_bytes: int) -> LatentTiles:
    """Choose a launch of chunks that fits into the shared memory of a program; 0: there is no limit."""
    fits = not shared_bytes or CHUNK_TILE_NUMBERS * number_bytes <= shared_bytes
    return CHUNK_TILES if fits else SMALL_CHUNK_TILES


def decode_latents(
    latent_query: torch.Tensor,
    rotary_query: torch.Tensor,
    layer: Latents,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    parts: torch.Tensor | None = None,
    tiles: LatentTiles | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return mixed latents of one new token per sequence, [num_seqs, num_heads, rank].

    Args:
        latent_query, rotary_query: [num_seqs, num_heads, rank] and [..., rotary_dim], the last contiguous.
        block_tables: [num_seqs, max_blocks] int32; entries past a sequence's last block are not read.
        context_lens: [num_seqs] int32; 0 marks padding, whose output is zeros.
        parts: A row of `decode_parts`, of `context_lens`; None: made here.
        output: Written, contiguous; None allocates.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    constants = _constants(latent_query, rotary_query, layer, block_tables, context_lens)
    num_seqs, num_heads, rank = latent_query.shape
    tiles = tiles or decode_tiles(layer)
    groups, heads = head_groups(num_heads, tiles), min(tiles.heads, num_heads)
    if parts is None:
        parts = decode_parts(context_lens, count_parts(groups, DECODE_PROGRAMS, context_lens.device))[0]
    count = count_of(parts, num_seqs)
    output = latent_query.new_empty((num_seqs, num_heads, rank)) if output is None else output
    partial, log_sums = piece_buffers(output, parts)
    _decode_part[(groups, count)](
        latent_query, rotary_query, *layer, block_tables, context_lens, parts, num_seqs,
        output, partial, log_sums, scale * LOG2_E.value, num_heads,
        *latent_query.stride()[:2], *rotary_query.stride()[:2], *layer[0].stride()[:2],
        *layer[1].stride()[:2], block_tables.stride(0), **constants,
        HEADS=heads, HEADS_PAD=max(16, triton.next_power_of_2(heads)),
        TILE=tiles.tokens, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    join_pieces(partial, log_sums, parts, output, OVERLAPS=False)
    return output


def prefill_latents(
    latent_query: torch.Tensor,
    rotary_query: torch.Tensor,
    layer: Latents,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    tiles: LatentTiles | None = None,
    capacity: int = 0,
) -> None:
    """Write mixed latents of packed chunks to `output`, [num_tokens, num_heads, rank].

    Args:
        query_starts: [num_seqs + 1] int32, ascending; chunk i is tokens query_starts[i] to query_starts[i +
            1], none where both are equal.
        output: Written in the tokens of chunks alone; contiguous.
        capacity: Keys of a workspace; chunks that have a place in it are left out (`expanded_latents.py`).

    The others are as for `decode_latents`; raises as that."""
    constants = _constants(latent_query, rotary_query, layer, block_tables, context_lens)
    if tiles is None:
        tiles = chunk_tiles(latent_query.element_size(), shared_memory_bytes(latent_query.device))
    num_tokens, num_heads, _ = latent_query.shape
    num_seqs = block_tables.shape[0]
    if query_starts.shape != (num_seqs + 1,) or query_starts.dtype != torch.int32:
        raise ValueError("query_starts must be [num_seqs + 1] int32")
    heads = min(tiles.heads, num_heads)
    rows = max(tiles.rows, 16, triton.next_power_of_2(heads))
    groups, tile_tokens = head_groups(num_heads, tiles), rows // heads
    most_keys = block_tables.shape[1] * constants["BLOCK_SIZE"]
    parts = tiles.parts or num_parts(groups * -(-num_tokens // tile_tokens), CHUNK_PROGRAMS, most_keys)
    results, log_sums = part_buffers(parts, output)
    _prefill_tile[(groups, num_tokens // tile_tokens + num_seqs, parts)](
        latent_query, rotary_query, *layer, block_tables, query_starts, context_lens, output, results,
        log_sums, num_seqs, num_tokens, scale * LOG2_E.value, num_heads,
        *latent_query.stride()[:2], *rotary_query.stride()[:2],
        *layer[0].stride()[:2], *layer[1].stride()[:2], block_tables.stride(0), **constants,
        HEADS=heads, ROWS=rows, TILE=tiles.tokens, PARTS=parts, LEAST_KEYS=tiles.least_keys,
        CAPACITY=capacity, LEAST=LEAST_TOKENS, STEP=STEP, SEQS_PAD=seqs_pad(num_seqs),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    join_parts(results, log_sums, query_starts, output)


def _constants(
    latent_query: torch.Tensor,
    rotary_query: torch.Tensor,
    layer: Latents,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> dict[str, Any]:
    """Return the kernels' compile-time constants; raise ValueError for what does not fit."""
    latents, rotary_keys = layer
    for query, field in ((latent_query, latents), (rotary_query, rotary_keys)):
        if field.dim() != 4 or field.shape[2] != 1 or query.shape[2] != field.shape[3]:
            raise ValueError(f"query {tuple(query.shape)} does not fit latents {tuple(field.shape)}")
        if query.dtype != field.dtype:
            raise ValueError(f"query is {query.dtype}, the cache {field.dtype}")
        if query.stride(2) != 1 or field.stride(3) != 1:
            raise ValueError("the last dimension must be contiguous in query and cache")
    if latent_query.shape[:2] != rotary_query.shape[:2]:
        raise ValueError(f"queries differ: {tuple(latent_query.shape)}, {tuple(rotary_query.shape)}")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be [num_seqs, max_blocks] int32 with contiguous rows")
    if context_lens.shape != block_tables.shape[:1] or context_lens.dtype != torch.int32:
        raise ValueError("context_lens must be [num_seqs] int32")
    rank, rotary = latents.shape[3], rotary_keys.shape[3]
    return {
        "RANK": rank,
        "RANK_PAD": max(16, triton.next_power_of_2(rank)),
        "ROTARY": rotary,
        "ROTARY_PAD": max(16, triton.next_power_of_2(rotary)),
        "BLOCK_SIZE": latents.shape[1],
    }


@triton.jit
def _attend_latents(
    mixed,  # [ROWS, RANK_PAD]
    total,  # [ROWS]
    highest,  # [ROWS]
    q,  # [ROWS, RANK_PAD]
    q_rotary,  # [ROWS, ROTARY_PAD]
    latents,  # [num_blocks, BLOCK_SIZE, RANK]
    rotary_keys,  # [num_blocks, BLOCK_SIZE, ROTARY]
    table,  # [max_blocks]
    begin,
    end,
    query_pos,  # [ROWS]
    scale,
    latent_block_stride,
    latent_token_stride,
    rotary_block_stride,
    rotary_token_stride,
    CAUSAL: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take positions `begin` to `end` into the running softmax; scores are base 2."""
    dims = tl.arange(0, RANK_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    for start in range(begin // TILE * TILE, end, TILE):
        at = start + tl.arange(0, TILE)
        seen = (at >= begin) & (at < end)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        row = block * latent_block_stride + (at % BLOCK_SIZE) * latent_token_stride
        latent = tl.load(
            latents + row[:, None] + dims[None, :], mask=seen[:, None] & (dims < RANK)[None, :], other=0.0
        )
        row = block * rotary_block_stride + (at % BLOCK_SIZE) * rotary_token_stride
        rotary = tl.load(
            rotary_keys + row[:, None] + rotary_dims[None, :],
            mask=seen[:, None] & (rotary_dims < ROTARY)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_rotary, tl.trans(rotary), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee") * scale
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (at[None, :] <= query_pos[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # a tile may hide everything from a row: keep the maximum finite
        raised = tl.maximum(highest, tl.maximum(tl.max(scores, 1), -1.0e30))
        weights = tl.exp2(scores - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None]
        mixed = tl.dot(weights.to(latent.dtype), latent, mixed, input_precision="ieee")
        highest = raised
    return mixed, total, highest


@triton.jit
def _decode_part(
    latent_query,  # [num_seqs, num_heads, RANK]
    rotary_query,  # [num_seqs, num_heads, ROTARY]
    latents,  # [num_blocks, BLOCK_SIZE, RANK]
    rotary_keys,  # [num_blocks, BLOCK_SIZE, ROTARY]
    block_tables,  # [num_seqs, max_blocks]
    context_lens,  # [num_seqs]
    parts,  # [2 * count + 2 + 5 * num_seqs]
    num_seqs,
    output,  # [num_seqs, num_heads, RANK]; written of sequences that are one piece
    partial,  # [num_slots, num_heads, RANK]; written of the others
    log_sums,  # [num_slots, num_heads], base 2
    scale,
    num_heads,
    latent_seq_stride,
    latent_head_stride,
    rotary_seq_stride,
    rotary_head_stride,
    latent_block_stride,
    latent_token_stride,
    rotary_block_stride,
    rotary_token_stride,
    table_stride,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    part = tl.program_id(1)
    count = tl.num_programs(1)
    at_unit, end_unit, seq = _part_of(parts, part, count)
    first_unit, length = _sequence_of(parts, context_lens, seq, count, num_seqs)
    rows = tl.arange(0, HEADS_PAD)
    heads = tl.program_id(0) * HEADS + rows
    is_head = (rows < HEADS) & (heads < num_heads)
    dims = tl.arange(0, RANK_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    mask = is_head[:, None] & (dims < RANK)[None, :]
    while at_unit < end_unit:
        begin = (at_unit - first_unit) * UNIT
        end = tl.minimum((end_unit - first_unit) * UNIT, length)
        is_first = begin == 0
        seq_at = seq.to(tl.int64)
        source = latent_query + seq_at * latent_seq_stride + heads[:, None] * latent_head_stride
        q = tl.load(source + dims[None, :], mask=mask, other=0.0)
        source = rotary_query + seq_at * rotary_seq_stride + heads[:, None] * rotary_head_stride
        q_rotary = tl.load(
            source + rotary_dims[None, :], mask=is_head[:, None] & (rotary_dims < ROTARY)[None, :], other=0.0
        )
        highest = tl.full([HEADS_PAD], float("-inf"), tl.float32)
        total = tl.zeros([HEADS_PAD], tl.float32)
        mixed = tl.zeros([HEADS_PAD, RANK_PAD], tl.float32)
        mixed, total, highest = _attend_latents(
            mixed, total, highest, q, q_rotary, latents, rotary_keys, block_tables + seq_at * table_stride,
            begin, end, rows, scale, latent_block_stride, latent_token_stride, rotary_block_stride,
            rotary_token_stride, False, RANK, RANK_PAD, ROTARY, ROTARY_PAD, BLOCK_SIZE, TILE,
        )  # fmt: skip
        total = tl.where(total > 0.0, total, 1.0)  # of padding, of which nothing is written
        mixed = mixed / total[:, None]
        if is_first & (end == length):
            slot = seq_at * num_heads + heads
            if length > 0:
                tl.store(output + slot[:, None] * RANK + dims[None, :], mixed, mask=mask)
        else:
            slot = _own_slot(parts, seq, part, count, num_seqs) * num_heads + heads
            tl.store(log_sums + slot, highest + tl.log2(total), mask=is_head)
            tl.store(partial + slot[:, None] * RANK + dims[None, :], mixed, mask=mask)
        at_unit = first_unit + tl.cdiv(length, UNIT)
        seq += 1
        first_unit, length = _sequence_of(parts, context_lens, seq, count, num_seqs)


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_tile(
    latent_query,  # [num_tokens, num_heads, RANK]
    rotary_query,  # [num_tokens, num_heads, ROTARY]
    latents,  # [num_blocks, BLOCK_SIZE, RANK]
    rotary_keys,  # [num_blocks, BLOCK_SIZE, ROTARY]
    block_tables,  # [num_seqs, max_blocks]
    query_starts,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    output,  # [num_tokens, num_heads, RANK]
    results,  # [PARTS, num_tokens, num_heads, RANK]
    log_sums,  # [PARTS, num_tokens, num_heads]
    num_seqs,
    num_tokens,
    scale,
    num_heads,
    latent_token_query_stride,
    latent_head_stride,
    rotary_token_query_stride,
    rotary_head_stride,
    latent_block_stride,
    latent_token_stride,
    rotary_block_stride,
    rotary_token_stride,
    table_stride,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    CAPACITY: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    SEQS_PAD: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // HEADS
    # a chunk's last tiles see the most: they start first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _chunk_of_tile(query_starts, num_seqs, tile, TOKENS)
    chunk_start = tl.load(query_starts + seq)
    chunk_len = tl.load(query_starts + seq + 1) - chunk_start
    first = (tile - (chunk_start // TOKENS + seq)) * TOKENS
    if (first < 0) | (first >= chunk_len):
        return
    prefix_len = tl.load(context_lens + seq) - chunk_len
    rows = tl.arange(0, ROWS)
    token = first + rows // HEADS
    heads = tl.program_id(0) * HEADS + rows % HEADS
    is_row = (rows < TOKENS * HEADS) & (token < chunk_len) & (heads < num_heads)
    dims = tl.arange(0, RANK_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    mask = is_row[:, None] & (dims < RANK)[None, :]
    token_at = (chunk_start + token).to(tl.int64)
    begin = 0
    end = prefix_len + tl.minimum(first + TOKENS, chunk_len)
    part = tl.program_id(2)
    row_at = token_at * num_heads + heads
    num_rows = tl.cast(num_tokens, tl.int64) * num_heads
    is_cut = False
    if CAPACITY > 0:
        is_left = _has_place(query_starts, context_lens, num_seqs, seq, CAPACITY, LEAST, STEP, SEQS_PAD)
        end = tl.where(is_left, 0, end)
    if PARTS > 1:
        begin, end, is_cut = _part_of_keys(begin, end, part, PARTS, LEAST_KEYS, TILE)
        if begin >= end:
            _write_absent(log_sums, row_at, num_rows, part, is_row)
            return
    if begin >= end:
        return
    source = latent_query + (token_at * latent_token_query_stride + heads * latent_head_stride)[:, None]
    q = tl.load(source + dims[None, :], mask=mask, other=0.0)
    source = rotary_query + (token_at * rotary_token_query_stride + heads * rotary_head_stride)[:, None]
    q_rotary = tl.load(
        source + rotary_dims[None, :], mask=is_row[:, None] & (rotary_dims < ROTARY)[None, :], other=0.0
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_PAD], tl.float32)
    mixed, total, highest = _attend_latents(
        mixed, total, highest, q, q_rotary, latents, rotary_keys,
        block_tables + seq.to(tl.int64) * table_stride, begin, end, prefix_len + token, scale,
        latent_block_stride, latent_token_stride, rotary_block_stride,
        rotary_token_stride, True, RANK, RANK_PAD, ROTARY, ROTARY_PAD, BLOCK_SIZE, TILE,
    )  # fmt: skip
    _write_part(
        mixed, total, highest, row_at, num_rows, part, is_cut, is_row, dims, output, results, log_sums, RANK
    )
