"""Parts of a step of decoding: the contexts of all sequences, one behind the other, cut into parts.

A device has so many programs under way at once. A step has as many parts as that, each for a program with
each KV head, so that all of them begin together and read about equally much, whatever the lengths are: no
long context is left to a few programs, and no program begins when the others have ended. A part holds pieces
of the sequences that lie in it: the end of one, several whole ones, the beginning of another. A sequence of
more than one piece is joined afterwards.

Each piece begins with a wait for its first tokens, so that a part with two takes longer. Where it makes no
part much longer, each sequence is cut for itself, and every part is one piece.

The parts are found on the device, once for all layers of a step that see alike: a CUDA graph has a fixed
number of programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

UNIT = tl.constexpr(32)
"""Tokens: each sequence and each part begins at a multiple of it."""

PIECE_UNITS = tl.constexpr(4)
"""Units that a program could read in the time that one more piece costs."""

JOINED_PIECES = tl.constexpr(8)
"""Pieces of one sequence that are joined in the time of a unit."""

AT_ONCE = 16
"""Parts that one program finds."""

ON_CPU = 4
"""Multiprocessors of a CPU: Triton's interpreter takes a millisecond for each program."""


class KernelPrograms(NamedTuple):
    """Numbers of programs for each multiprocessor, among which contexts are divided."""

    all: int
    """Programs that are under way at once."""
    apart: int
    """The most where each sequence is cut for itself, but for one of each."""


class PartCounts(NamedTuple):
    """Numbers of parts, each of which has a program for each KV head."""

    all: int
    apart: int


def count_parts(num_heads: int, programs: KernelPrograms, device: torch.device) -> PartCounts:
    """Return the numbers of parts of a step whose KV heads have a program each for every part."""
    return PartCounts(*(max(1, each * _multiprocessors(device) // num_heads) for each in programs))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ON_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_parts(
    context_lens: torch.Tensor, counts: PartCounts, windows: tuple[int, ...] = (0,)
) -> torch.Tensor:
    """Return the parts of a step, a row for each window.

    Args:
        context_lens: [num_seqs] int32, contiguous; 0 marks a row of padding, which has no piece.
        counts: Of parts.
        windows: Numbers of last tokens of each context that are read; 0: all.

    Returns:
        [num_windows, 2 * all + 1 + 3 * num_seqs] int32: the unit at which each part begins, and where the
        last one ends; the sequence in which each begins, num_seqs where nothing is left for it; then of the
        sequences the units at which they begin, the parts in which they do, and the numbers of their pieces,
        which lie in one part after the other. Units are counted over all sequences, one behind the other.
    """
    num_seqs = context_lens.shape[0]
    parts = context_lens.new_empty((len(windows), 2 * counts.all + 1 + 3 * num_seqs))
    padded = max(2, triton.next_power_of_2(num_seqs))
    for row, window in zip(parts, windows, strict=True):
        _cut[(counts.all // AT_ONCE + 1,)](
            context_lens, row, num_seqs, *counts, WINDOW=window, SEQS_PAD=padded, AT_ONCE=AT_ONCE,
            num_warps=min(16, max(2, padded // 16)),
        )  # fmt: skip
    return parts


def count_of(parts: torch.Tensor, num_seqs: int) -> int:
    """Return the number of parts in a row of `decode_parts`."""
    return (parts.shape[0] - 1 - 3 * num_seqs) // 2


@triton.jit
def _first_read(length, WINDOW: tl.constexpr):
    """Return where the reading of a context begins, a multiple of `UNIT`."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, 0) // UNIT * UNIT
    return length * 0


@triton.jit
def _cut(
    context_lens,  # [num_seqs]
    parts,  # [2 * count + 1 + 3 * num_seqs]
    num_seqs,
    count,
    apart,
    WINDOW: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    seqs = tl.arange(0, SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    units = tl.cdiv(lens - _first_read(lens, WINDOW), UNIT)
    ends = tl.cumsum(units, 0)
    begins = ends - units
    total = tl.maximum(tl.sum(units, 0), 1)
    num_cut = tl.maximum(tl.sum((units > 0).to(tl.int32), 0), 1)
    used = tl.minimum(total, count)
    shares = tl.minimum(tl.maximum(units * apart // total, 1), tl.maximum(count // 2, 1))
    shares = tl.minimum(shares, units)
    behind = tl.cumsum(shares, 0)
    longest = tl.max(tl.cdiv(units, tl.maximum(shares, 1)), 0)
    is_short = longest <= tl.cdiv(total, used) + PIECE_UNITS + count // (JOINED_PIECES * num_cut)
    is_apart = is_short & (tl.sum(shares, 0) <= count)
    part = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    piece = part[:, None] - (behind - shares)[None, :]
    is_own = (piece >= 0) & (piece < shares[None, :])
    own = begins[None, :] + piece * units[None, :] // tl.maximum(shares, 1)[None, :]
    own = tl.sum(tl.where(is_own, own, 0), 1) + tl.where(part < tl.sum(shares, 0), 0, tl.sum(units, 0))
    begin = tl.where(is_apart, own, tl.minimum(part, used) * tl.sum(units, 0) // used)
    first = tl.sum(((ends[None, :] <= begin[:, None]) & is_seq[None, :]).to(tl.int32), 1)
    tl.store(parts + part, begin, mask=part <= count)
    tl.store(parts + count + 1 + part, first, mask=part < count)
    if tl.program_id(0) == 0:
        of_seq = parts + 2 * count + 1 + seqs
        first_part = ((begins + 1) * used - 1) // total
        last_part = (ends * used - 1) // total
        pieces = tl.where(is_apart, shares, tl.where(units > 0, last_part - first_part + 1, 0))
        tl.store(of_seq, begins, mask=is_seq)
        tl.store(of_seq + num_seqs, tl.where(is_apart, behind - shares, first_part), mask=is_seq)
        tl.store(of_seq + 2 * num_seqs, pieces, mask=is_seq)


@triton.jit
def _part_of(parts, part, count):
    """Return the units at which a part begins and ends, and the sequence in which it begins."""
    return tl.load(parts + part), tl.load(parts + part + 1), tl.load(parts + count + 1 + part)


@triton.jit
def _sequence_of(parts, context_lens, seq, count, num_seqs):
    """Return the unit at which a sequence begins, and its length; of one past the last, any."""
    seq = tl.minimum(seq, num_seqs - 1)
    return tl.load(parts + 2 * count + 1 + seq), tl.load(context_lens + seq)


@triton.jit
def _pieces_of(parts, seq, count, num_seqs):
    """Return the part in which a sequence begins, and the number of its pieces."""
    at = parts + 2 * count + 1 + num_seqs + seq
    return tl.load(at), tl.load(at + num_seqs)
