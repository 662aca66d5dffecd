"""Attention of chunks over K and V of heads that are made of paged latents: launchers and kernels.

Of DeepSeek's heads a pair of a query and a key takes 640 operations over K and V, and 2,176 absorbed
(`paged_latents.py`). So for a chunk of some length K and V of its whole context are made, once for all of its
queries, in a workspace that the next layer writes over:

    workspace    keys of chunk 0, up to a multiple of TILE | keys of chunk 2 | ...     CAPACITY keys at most

Chunks shorter than `LEAST_TOKENS`, and those that have no place there, are absorbed. Which they are follows
on the device from the chunks' lengths; launches depend on shapes alone, so that one graph serves them all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.devices import shared_memory_bytes
from engine.kernels.key_parts import (
    _part_of_keys,
    _write_absent,
    _write_part,
    join_parts,
    num_parts,
    part_buffers,
)
from engine.kernels.paged_layer import LOG2_E
from engine.kernels.paged_prefill import PrefillTiles

LEAST_TOKENS = 128
"""Tokens of a chunk from which K and V are made for it."""

TILE = 128
"""Keys that are made at a time."""
RANKS = 64
"""Numbers of latents that are read at a time to make them."""

WORKSPACE_BYTES = 1 << 30
"""Bytes that K and V may take at most: 131,072 keys of 16 heads of DeepSeek's."""

WIDEST_AT_ONCE = tl.constexpr(256)
"""Numbers of a key that registers have room for, of K without its rotary half and V together."""

CONTEXTS = 8
"""Longest contexts that a workspace has places for, if they take no more than that."""

PROGRAMS = 132
"""Programs under way at once."""

USUAL_SEQS = 256
"""Chunks for which kernels are compiled; a program reads as many lengths at once, one in each thread."""

Latents = tuple[torch.Tensor, torch.Tensor]
"""Latents and rotary keys of one layer, each [num_blocks, block_size, 1, width]; any block stride."""


class Chunks(NamedTuple):
    """Packed chunks of several sequences."""

    tables: torch.Tensor
    """[num_seqs, max_blocks] int32; entries past a sequence's last block are not read."""
    starts: torch.Tensor
    """[num_seqs + 1] int32, ascending; chunk i is tokens starts[i] to starts[i + 1], which may be none."""
    lens: torch.Tensor
    """[num_seqs] int32; the context of each, with the chunk."""


TILES = (
    *(PrefillTiles(rows=128, tokens=64, num_warps=8, num_stages=stages) for stages in (3, 2, 1)),
    PrefillTiles(rows=64, tokens=32, num_warps=4, num_stages=1),
)
"""Launches, the fastest first; a KV head has one query head, and tokens read at a time divide TILE."""


def expanded_tiles(key_width: int, value_width: int, number_bytes: int, shared_bytes: int) -> PrefillTiles:
    """Return the first of `TILES` that fits into the shared memory of a program; the last if none does.

    Heads of GLM Lite are wider than DeepSeek's, and of three stages on an H200 take 74 KB more than there is.

    Args:
        key_width, value_width: Of heads as kernels pad them, K with its rotary half.
        shared_bytes: 0: there is no limit.
    """
    for tiles in TILES:
        numbers = tiles.rows * key_width + tiles.num_stages * tiles.tokens * (key_width + value_width)
        if not shared_bytes or numbers * number_bytes <= shared_bytes:
            return tiles
    return TILES[-1]


def expand_stages(width: int, number_bytes: int, shared_bytes: int) -> int:
    """Return the stages of the kernel that makes so many numbers of a key at once, as `expanded_tiles`."""
    stage_bytes = RANKS * (TILE + width) * number_bytes
    return max(1, min(3, shared_bytes // stage_bytes)) if shared_bytes else 3


def capacity_of(num_tokens: int, tables: torch.Tensor, block_size: int, weight: torch.Tensor) -> int:
    """Return how many keys a step's workspace has places for; 0: it has none.

    Args:
        num_tokens: Of the step.
        tables: Blocks of its chunks.
        weight: [num_heads, nope_dim + value_dim, rank]
    """
    if num_tokens < LEAST_TOKENS:
        return 0
    key_bytes = weight.shape[0] * weight.shape[1] * weight.element_size()
    return workspace_keys(tables.shape[1] * block_size, key_bytes)


def workspace_keys(context_tokens: int, key_bytes: int) -> int:
    """Return the places of any step's workspace: for `CONTEXTS` of the longest, within `WORKSPACE_BYTES`."""
    return min(-(-CONTEXTS * context_tokens // TILE), WORKSPACE_BYTES // key_bytes // TILE) * TILE


def attend_expanded(
    query: torch.Tensor,
    layer: Latents,
    weight: torch.Tensor,
    nope_dim: int,
    chunks: Chunks,
    capacity: int,
    scale: float,
    output: torch.Tensor,
    tiles: PrefillTiles | None = None,
) -> None:
    """Write the causal attention of those chunks that have a place in a workspace of `capacity` keys.

    Args:
        query: [num_tokens, num_heads, nope_dim + rotary_dim], the last contiguous.
        weight: [num_heads, nope_dim + value_dim, rank], contiguous; makes K without its rotary half, and V.
        output: [num_tokens, num_heads, value_dim], contiguous.
        tiles: None: those that the device has room for.
    """
    heads, rotary = expand_latents(layer, weight, nope_dim, chunks, capacity)
    (num_tokens, num_heads, _), value_dim, rotary_dim = query.shape, output.shape[2], rotary.shape[1]
    if tiles is None:
        key_width, shared_bytes = _padded(nope_dim) + _padded(rotary_dim), shared_memory_bytes(query.device)
        tiles = expanded_tiles(key_width, _padded(value_dim), query.element_size(), shared_bytes)
    num_seqs = len(chunks.lens)
    num_tiles = num_tokens // tiles.rows + min(num_seqs, num_tokens // LEAST_TOKENS)
    most_keys = chunks.tables.shape[1] * layer[0].shape[1]
    parts = tiles.parts or num_parts(num_heads * -(-num_tokens // tiles.rows), PROGRAMS, most_keys)
    results, log_sums = part_buffers(parts, output)
    if parts > 1:
        log_sums[1].fill_(float("inf"))  # absent, of all tokens that no program is for
    _prefill_tile[(num_heads, num_tiles, parts)](
        query, heads, rotary, chunks.starts, chunks.lens, output, results, log_sums, num_seqs, num_tokens,
        num_heads, scale * LOG2_E.value, *query.stride()[:2],
        CAPACITY=capacity, LEAST=LEAST_TOKENS, STEP=TILE, SEQS_PAD=seqs_pad(num_seqs),
        NOPE=nope_dim, NOPE_PAD=_padded(nope_dim), VALUE=value_dim, VALUE_PAD=_padded(value_dim),
        ROTARY=rotary_dim, ROTARY_PAD=_padded(rotary_dim), ROWS=tiles.rows, TILE=tiles.tokens, PARTS=parts,
        LEAST_KEYS=tiles.least_keys, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    join_parts(results, log_sums, chunks.starts, output)


def expand_latents(
    layer: Latents, weight: torch.Tensor, nope_dim: int, chunks: Chunks, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is made of the latents of chunks that have a place, and their rotary keys.

    The former are K without its rotary half and V side by side, [num_heads, capacity, nope_dim + value_dim],
    the latter [capacity, rotary_dim]."""
    latents, rotary_keys = layer
    num_heads, width, rank = weight.shape
    value_dim, rotary_dim = width - nope_dim, rotary_keys.shape[3]
    if not weight.is_contiguous() or weight.dtype != latents.dtype:
        raise ValueError(f"the layer's weight must be contiguous {latents.dtype}, and is {weight.dtype}")
    heads = latents.new_empty((num_heads, capacity, width))
    rotary = rotary_keys.new_empty((capacity, rotary_dim))
    num_seqs = len(chunks.lens)
    halves = _padded(nope_dim), _padded(value_dim)
    at_once = sum(halves) if sum(halves) <= WIDEST_AT_ONCE.value else max(halves)
    stages = expand_stages(at_once, latents.element_size(), shared_memory_bytes(latents.device))
    _expand_tiles[(max(1, PROGRAMS // num_heads), num_heads)](
        latents, rotary_keys, weight, *chunks, heads, rotary, num_seqs,
        *latents.stride()[:2], *rotary_keys.stride()[:2], chunks.tables.stride(0),
        CAPACITY=capacity, LEAST=LEAST_TOKENS, TILE=TILE, SEQS_PAD=seqs_pad(num_seqs),
        NOPE=nope_dim, NOPE_PAD=_padded(nope_dim), VALUE=value_dim, VALUE_PAD=_padded(value_dim),
        ROTARY=rotary_dim, ROTARY_PAD=_padded(rotary_dim), RANK=rank, RANKS=min(RANKS, _padded(rank)),
        BLOCK_SIZE=latents.shape[1], num_warps=8, num_stages=stages,
    )  # fmt: skip
    return heads, rotary


def seqs_pad(num_seqs: int) -> int:
    """Return for how many chunks kernels are compiled: the same for nearly all steps."""
    return max(USUAL_SEQS, int(triton.next_power_of_2(num_seqs)))


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


@triton.jit
def _places(
    query_starts, context_lens, num_seqs, LEAST: tl.constexpr, STEP: tl.constexpr, SEQS_PAD: tl.constexpr
):
    """Return chunks' numbers, first tokens, lengths, contexts, and keys in the workspace, all [SEQS_PAD]."""
    at = tl.arange(0, SEQS_PAD)
    is_chunk = at < num_seqs
    starts = tl.load(query_starts + at, mask=is_chunk, other=0)
    lens = tl.load(query_starts + at + 1, mask=is_chunk, other=0) - starts
    contexts = tl.load(context_lens + at, mask=is_chunk, other=0)
    return at, starts, lens, contexts, tl.where(lens >= LEAST, tl.cdiv(contexts, STEP) * STEP, 0)


@triton.jit
def _has_place(
    query_starts,
    context_lens,
    num_seqs,
    seq,
    CAPACITY: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    SEQS_PAD: tl.constexpr,
):
    """Return whether K and V are made for a chunk."""
    at, _, _, _, widths = _places(query_starts, context_lens, num_seqs, LEAST, STEP, SEQS_PAD)
    own = tl.sum(tl.where(at == seq, widths, 0), 0)
    return (own > 0) & (tl.sum(tl.where(at <= seq, widths, 0), 0) <= CAPACITY)


@triton.jit
def _made(
    source,  # [TILE, 1], the first number of each row of latents
    weight,  # [NOPE + VALUE, RANK]
    is_key,  # [TILE]
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return K without its rotary half and V of one head's tile, [TILE, NOPE_PAD] and [TILE, VALUE_PAD]."""
    dims = tl.arange(0, NOPE_PAD)[None, :]
    value_dims = tl.arange(0, VALUE_PAD)[None, :]
    ranks = tl.arange(0, RANKS)
    TILE: tl.constexpr = is_key.shape[0]
    nope = tl.zeros([TILE, NOPE_PAD], tl.float32)
    value = tl.zeros([TILE, VALUE_PAD], tl.float32)
    for rank in range(0, RANK, RANKS):
        is_rank = rank + ranks < RANK
        rows = tl.load(source + rank + ranks[None, :], mask=is_key[:, None] & is_rank[None, :], other=0.0)
        of_rank = weight + rank + ranks[:, None]
        half = tl.load(of_rank + dims * RANK, mask=is_rank[:, None] & (dims < NOPE), other=0.0)
        nope = tl.dot(rows, half, nope, input_precision="ieee")
        mask = is_rank[:, None] & (value_dims < VALUE)
        half = tl.load(of_rank + (NOPE + value_dims) * RANK, mask=mask, other=0.0)
        value = tl.dot(rows, half, value, input_precision="ieee")
    return nope, value


@triton.jit
def _half_made(
    source,  # [TILE, 1], the first number of each row of latents
    weight,  # [DIM, RANK]
    is_key,  # [TILE]
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return one head's K without its rotary half, or its V, of a tile of keys, [TILE, DIM_PAD]."""
    dims = tl.arange(0, DIM_PAD)[None, :]
    ranks = tl.arange(0, RANKS)
    made = tl.zeros([is_key.shape[0], DIM_PAD], tl.float32)
    for rank in range(0, RANK, RANKS):
        is_rank = rank + ranks < RANK
        rows = tl.load(source + rank + ranks[None, :], mask=is_key[:, None] & is_rank[None, :], other=0.0)
        mask = is_rank[:, None] & (dims < DIM)
        columns = tl.load(weight + rank + ranks[:, None] + dims * RANK, mask=mask, other=0.0)
        made = tl.dot(rows, columns, made, input_precision="ieee")
    return made


@triton.jit(do_not_specialize=["num_seqs"])
def _expand_tiles(
    latents,  # [num_blocks, BLOCK_SIZE, RANK]
    rotary_keys,  # [num_blocks, BLOCK_SIZE, ROTARY]
    weight,  # [num_heads, NOPE + VALUE, RANK]
    block_tables,  # [num_seqs, max_blocks]
    query_starts,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    heads,  # [num_heads, CAPACITY, NOPE + VALUE]
    rotary,  # [CAPACITY, ROTARY]
    num_seqs,
    latent_block_stride,
    latent_token_stride,
    rotary_block_stride,
    rotary_token_stride,
    table_stride,
    CAPACITY: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Make tiles of keys of one head, as many apart as there are programs for it."""
    at, _, _, contexts, widths = _places(query_starts, context_lens, num_seqs, LEAST, TILE, SEQS_PAD)
    ends = tl.cumsum(widths, 0)
    num_keys = tl.max(tl.where(ends <= CAPACITY, ends, 0), 0)
    head = tl.program_id(1)
    head_weight = weight + head * ((NOPE + VALUE) * RANK)
    head_rows = heads + head.to(tl.int64) * (CAPACITY * (NOPE + VALUE))
    dims, value_dims = tl.arange(0, NOPE_PAD)[None, :], tl.arange(0, VALUE_PAD)[None, :]
    rotary_dims = tl.arange(0, ROTARY_PAD)[None, :]
    for first in range(tl.program_id(0) * TILE, num_keys, tl.num_programs(0) * TILE):
        seq = tl.sum(((ends <= first) & (at < num_seqs)).to(tl.int32), 0)
        rows = first + tl.arange(0, TILE)
        position = rows - tl.sum(tl.where(at == seq, ends - widths, 0), 0)
        is_key = position < tl.sum(tl.where(at == seq, contexts, 0), 0)
        table = block_tables + seq.to(tl.int64) * table_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        inside = position % BLOCK_SIZE
        source = latents + (block * latent_block_stride + inside * latent_token_stride)[:, None]
        into = head_rows + rows[:, None] * (NOPE + VALUE)
        if NOPE_PAD + VALUE_PAD > WIDEST_AT_ONCE:
            nope = _half_made(source, head_weight, is_key, NOPE, NOPE_PAD, RANK, RANKS)
            tl.store(into + dims, nope, mask=dims < NOPE)
            value = _half_made(source, head_weight + NOPE * RANK, is_key, VALUE, VALUE_PAD, RANK, RANKS)
        else:
            nope, value = _made(source, head_weight, is_key, NOPE, NOPE_PAD, VALUE, VALUE_PAD, RANK, RANKS)
            tl.store(into + dims, nope, mask=dims < NOPE)
        tl.store(into + NOPE + value_dims, value, mask=value_dims < VALUE)
        if head == 0:
            source = rotary_keys + (block * rotary_block_stride + inside * rotary_token_stride)[:, None]
            turned = tl.load(source + rotary_dims, mask=is_key[:, None] & (rotary_dims < ROTARY), other=0.0)
            tl.store(rotary + rows[:, None] * ROTARY + rotary_dims, turned, mask=rotary_dims < ROTARY)


@triton.jit
def _attend_keys(
    mixed,  # [ROWS, VALUE_PAD]
    total,  # [ROWS]
    highest,  # [ROWS]
    q,  # [ROWS, NOPE_PAD]
    q_rotary,  # [ROWS, ROTARY_PAD]
    head_rows,  # [>= end, NOPE + VALUE]
    rotary,  # [>= end, ROTARY]
    begin,
    end,
    query_pos,  # [ROWS]
    scale,
    MASKED: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take positions `begin` to `end` into the running softmax; scores are base 2."""
    nope_dims = tl.arange(0, NOPE_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        source = head_rows + at[:, None] * (NOPE + VALUE)
        key = tl.load(source + nope_dims[None, :], mask=(nope_dims < NOPE)[None, :], other=0.0)
        turned = tl.load(
            rotary + at[:, None] * ROTARY + rotary_dims[None, :],
            mask=(rotary_dims < ROTARY)[None, :],
            other=0.0,
        )
        value = tl.load(source + NOPE + value_dims[None, :], mask=(value_dims < VALUE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(turned), scores, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(at[None, :] <= query_pos[:, None], scores, float("-inf"))
        # a tile may hide everything from a row: keep the maximum finite
        raised = tl.maximum(highest, tl.maximum(tl.max(scores, 1), -1.0e30))
        weights = tl.exp2(scores - raised[:, None])
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None]
        mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision="ieee")
        highest = raised
    return mixed, total, highest


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_tile(
    query,  # [num_tokens, num_heads, NOPE + ROTARY]
    heads,  # [num_heads, CAPACITY, NOPE + VALUE]
    rotary,  # [CAPACITY, ROTARY]
    query_starts,  # [num_seqs + 1]
    context_lens,  # [num_seqs]
    output,  # [num_tokens, num_heads, VALUE]
    results,  # [PARTS, num_tokens, num_heads, VALUE]
    log_sums,  # [PARTS, num_tokens, num_heads]
    num_seqs,
    num_tokens,
    num_heads,
    scale,
    query_token_stride,
    query_head_stride,
    CAPACITY: tl.constexpr,
    LEAST: tl.constexpr,
    STEP: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
):
    # a chunk's last tiles see the most: they start first
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    at, starts, lens, contexts, widths = _places(query_starts, context_lens, num_seqs, LEAST, STEP, SEQS_PAD)
    # each chunk that is long enough begins at a tile of its own: it allows for the rounding of those before
    firsts = starts // ROWS + tl.cumsum((widths > 0).to(tl.int32), 0) - 1
    seq = tl.max(tl.where((widths > 0) & (firsts <= tile), at, -1), 0)
    is_own = at == seq
    end_key = tl.sum(tl.where(at <= seq, widths, 0), 0)
    chunk_len = tl.sum(tl.where(is_own, lens, 0), 0)
    first = (tile - tl.sum(tl.where(is_own, firsts, 0), 0)) * ROWS
    if (first >= chunk_len) | (end_key > CAPACITY):
        return
    chunk_start = tl.sum(tl.where(is_own, starts, 0), 0)
    begin_key = end_key - tl.sum(tl.where(is_own, widths, 0), 0)
    prefix_len = tl.sum(tl.where(is_own, contexts, 0), 0) - chunk_len
    head = tl.program_id(0)
    token = first + tl.arange(0, ROWS)
    is_row = token < chunk_len
    token_at = (chunk_start + token).to(tl.int64)
    row_at = token_at * num_heads + head
    num_rows = tl.cast(num_tokens, tl.int64) * num_heads
    begin = 0
    end = prefix_len + tl.minimum(first + ROWS, chunk_len)
    # every row sees all of the positions before this one
    whole = (prefix_len + first + 1) // TILE * TILE
    part = tl.program_id(2)
    is_cut = False
    if PARTS > 1:
        begin, end, is_cut = _part_of_keys(begin, end, part, PARTS, LEAST_KEYS, TILE)
        if begin >= end:
            _write_absent(log_sums, row_at, num_rows, part, is_row)
            return
        whole = tl.minimum(tl.maximum(whole, begin), end)
    nope_dims = tl.arange(0, NOPE_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    rotary_dims = tl.arange(0, ROTARY_PAD)
    source = query + (token_at * query_token_stride + head * query_head_stride)[:, None]
    q = tl.load(source + nope_dims[None, :], mask=is_row[:, None] & (nope_dims < NOPE)[None, :], other=0.0)
    q_rotary = tl.load(
        source + NOPE + rotary_dims[None, :],
        mask=is_row[:, None] & (rotary_dims < ROTARY)[None, :],
        other=0.0,
    )
    head_rows = heads + (head.to(tl.int64) * CAPACITY + begin_key) * (NOPE + VALUE)
    own_rotary = rotary + begin_key.to(tl.int64) * ROTARY
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    mixed, total, highest = _attend_keys(
        mixed, total, highest, q, q_rotary, head_rows, own_rotary, begin, whole, prefix_len + token, scale,
        False, NOPE, NOPE_PAD, VALUE, VALUE_PAD, ROTARY, ROTARY_PAD, TILE,
    )  # fmt: skip
    mixed, total, highest = _attend_keys(
        mixed, total, highest, q, q_rotary, head_rows, own_rotary, whole, end, prefix_len + token, scale,
        True, NOPE, NOPE_PAD, VALUE, VALUE_PAD, ROTARY, ROTARY_PAD, TILE,
    )  # fmt: skip
    _write_part(
        mixed, total, highest, row_at, num_rows, part, is_cut, is_row, value_dims, output, results, log_sums,
        VALUE,
    )  # fmt: skip
