"""Keys of chunks' tiles, cut into parts: a few tiles are too few programs for a GPU.

Flash-Decoding does it for one token (split-KV); here it is done for tiles of several.

A tile of a short chunk after a long prefix reads all keys before it, one tile of them after the other, while
most multiprocessors have nothing to do. So its keys are cut into parts, as many as the shapes leave programs
for; each part is a program of its own, and a second kernel joins what they found. How many keys a part has
follows on the device from those that the tile sees: one of few keys is one part, which writes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping

MAX_PARTS = 8

LEAST_KEYS = 512
"""Number of keys of a tile for each of which it has one more part."""

JOINED_HEADS = 8
"""Query heads whose parts a program joins."""


def num_parts(num_tiles: int, programs: int, most_keys: int) -> int:
    """Return the number of parts that the keys of each tile are cut into at most.

    Args:
        num_tiles: Of all chunks and KV heads.
        programs: Programs that are under way at once.
        most_keys: Of a tile.
    """
    return max(1, min(MAX_PARTS, programs // max(1, num_tiles), most_keys // LEAST_KEYS))


def part_buffers(parts: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what parts write of an output [num_tokens, num_heads, dim]: results and logs of sums (lse).

    The former are [parts, *output.shape], the latter [parts, num_tokens, num_heads], both float32. One part
    writes neither, and has the output for them."""
    if parts == 1:
        return output, output
    like = output.new_empty
    results = like((parts, *output.shape), dtype=torch.float32)
    return results, like((parts, *output.shape[:2]), dtype=torch.float32)


def join_parts(
    results: torch.Tensor, log_sums: torch.Tensor, query_starts: torch.Tensor, output: torch.Tensor
) -> None:
    """Write what parts come to, in the tokens of chunks whose keys were cut.

    Args:
        results, log_sums: As `part_buffers` makes them; the sums are of base 2.
        query_starts: [num_seqs + 1] int32; the first token of each chunk, and the end of the last one.
        output: [num_tokens, num_heads, dim], contiguous.
    """
    if results is output:
        return
    parts, num_tokens, num_heads, dim = results.shape
    heads = min(JOINED_HEADS, triton.next_power_of_2(num_heads))
    _join_rows[(num_tokens, -(-num_heads // heads))](
        results, log_sums, query_starts, output, query_starts.shape[0] - 1, num_tokens, num_heads,
        PARTS=parts, HEADS=heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), num_warps=1,
        **overlapping(output.device),
    )  # fmt: skip


@triton.jit
def _part_of_keys(begin, end, part, PARTS: tl.constexpr, LEAST_KEYS: tl.constexpr, TILE: tl.constexpr):
    """Return the keys of a part of those from `begin` to `end`, and whether there is more than one part."""
    keys = end - begin
    count = tl.minimum(PARTS, tl.maximum(keys // LEAST_KEYS, 1))
    length = tl.cdiv(tl.cdiv(keys, count), TILE) * TILE
    begin += part * length
    return begin, tl.minimum(begin + length, end), length < keys


@triton.jit
def _write_absent(log_sums, row, num_rows, part, row_mask):
    """Write that some rows have no such part."""
    tl.store(log_sums + part.to(tl.int64) * num_rows + row, float("inf"), mask=row_mask)


@triton.jit
def _write_part(
    mixed,  # [ROWS, DIM_PAD], sums of values by their weights
    total,  # [ROWS]
    highest,  # [ROWS], base 2
    row,  # [ROWS] int64; token times heads plus head
    num_rows,
    part,
    is_cut,
    row_mask,  # [ROWS]
    dims,  # [DIM_PAD]
    output,
    results,
    log_sums,
    DIM: tl.constexpr,
):
    """Write what a part found: the result, where it is the only one."""
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = row[:, None] * DIM + dims[None, :]
    mask = row_mask[:, None] & (dims < DIM)[None, :]
    if is_cut:
        first = part.to(tl.int64) * num_rows
        tl.store(results + first * DIM + at, mixed, mask=mask)
        # a row may see none of a part
        sums = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(log_sums + first + row, sums, mask=row_mask)
    else:
        tl.store(output + at, mixed, mask=mask)


@triton.jit(do_not_specialize=["num_seqs"])
def _join_rows(
    results,  # [PARTS, num_tokens, num_heads, DIM]
    log_sums,  # [PARTS, num_tokens, num_heads]
    query_starts,  # [num_seqs + 1]
    output,  # [num_tokens, num_heads, DIM]
    num_seqs,
    num_tokens,
    num_heads,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0)
    # What a step is made of lies there since before the last kernel: it is read while that one ends.
    is_of_chunk = (token >= tl.load(query_starts)) & (token < tl.load(query_starts + num_seqs))
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    dims = tl.arange(0, DIM_PAD)
    mask = is_head[:, None] & (dims < DIM)[None, :]
    row = token.to(tl.int64) * num_heads + heads
    num_rows = tl.cast(num_tokens, tl.int64) * num_heads  # a number of 1 is a constant
    _await_inputs(OVERLAPS)
    _launch_next(OVERLAPS)
    if not is_of_chunk:
        return
    absent = float("inf")
    # the tile of the only part wrote the result
    if tl.max(tl.load(log_sums + num_rows + row, mask=is_head, other=0.0), 0) == absent:
        return
    highest = tl.full([HEADS], -1.0e30, tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.load(log_sums + part * num_rows + row, mask=is_head, other=0.0)
        highest = tl.maximum(highest, tl.where(sums == absent, -1.0e30, sums))
    mixed = tl.zeros([HEADS, DIM_PAD], tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.load(log_sums + part * num_rows + row, mask=is_head, other=0.0)
        weights = tl.where(sums == absent, 0.0, tl.exp2(sums - highest))
        source = results + (part * num_rows + row)[:, None] * DIM + dims[None, :]
        found = tl.load(source, mask=mask & (sums != absent)[:, None], other=0.0)
        mixed += weights[:, None] * found
        total += weights
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + row[:, None] * DIM + dims[None, :], mixed, mask=mask)
