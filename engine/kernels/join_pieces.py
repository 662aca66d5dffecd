"""Pieces of decode attention become one (Flash-Decoding's second step): launcher and kernel.

Attention over a piece of a context is a mean of its values; beside it stands the logarithm of the sum of its
weights (`log_sums`), by which pieces are weighted when they are joined. Each piece has a slot, those of a
sequence one behind the other, what was read for its group first. A sequence of one piece was written by
whoever computed it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.decode_parts import _slots_of, count_of, count_slots
from engine.kernels.dependent_launch import _await_inputs
from engine.kernels.paged_layer import LOG2_E


def piece_buffers(
    output: torch.Tensor, parts: torch.Tensor, members: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what pieces are written to: results [num_slots, num_heads, dim], and log sums without the last.

    Args:
        output: [num_seqs, num_heads, dim].
        parts: A row of `decode_parts`.
        members: The most sequences of a group; 1: nobody shares."""
    num_seqs, num_heads, dim = output.shape
    slots = count_slots(count_of(parts, num_seqs), num_seqs, members)
    partial = output.new_empty((slots, num_heads, dim), dtype=torch.float32)
    return partial, output.new_empty((slots, num_heads), dtype=torch.float32)


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
        partial, log_sums: As `piece_buffers` makes them.
        parts: A row of `decode_parts`.
        output: [num_seqs, num_heads, dim], contiguous.
        overlap: Options of the launch."""
    num_seqs, num_heads, dim = output.shape
    dim_pad = triton.next_power_of_2(dim)
    width, rows, grid = join_grid(num_heads, dim_pad, num_seqs)
    _join_pieces[grid](
        partial, log_sums, parts, count_of(parts, num_seqs), num_heads, log_sums if sinks is None else sinks,
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
def _join_pieces(
    partial,  # [num_slots, num_heads, DIM]
    log_sums,  # [num_slots, num_heads], base 2
    parts,  # [2 * count + 2 + 5 * num_seqs]
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
    first_slot, num_pieces = _slots_of(parts, seq, count, tl.num_programs(1))
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
        at = (first_slot + piece).to(tl.int64)[None, :] * num_heads + heads[:, None]
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
