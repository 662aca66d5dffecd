"""Parts of a step of decoding: the contexts of all sequences, one behind the other, cut into parts.

A device has so many programs under way at once. A step has as many parts as that, each for a program with
each KV head, so that all of them begin together and read about equally much, whatever the lengths are: no
long context is left to a few programs, and no program begins when the others have ended. A part holds pieces
of the sequences that lie in it: the end of one, several whole ones, the beginning of another. A sequence of
more than one piece is joined afterwards.

Each piece begins with a wait for its first tokens, so that a part with two takes longer. Where it makes no
part much longer, each sequence is cut for itself, and every part is one piece.

Sequences that begin with the same blocks may be a group (`engine/prefix_groups.py`): what they share is read
once, in parts of its own, by programs whose rows are the queries of all; what each reads for itself begins
behind it.

The parts are found on the device, once for all layers of a step that see alike: a CUDA graph has a fixed
number of programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine import prefix_groups

UNIT = tl.constexpr(prefix_groups.UNIT)
"""Tokens: each sequence and each part begins at a multiple of it."""

PIECE_UNITS = tl.constexpr(4)
"""Units that a program could read in the time that one more piece costs."""

JOINED_PIECES = tl.constexpr(8)
"""Pieces of one sequence that are joined in the time of a unit."""

SEQ_NUMBERS = 5
"""Numbers of each sequence in a row of parts."""

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
    context_lens: torch.Tensor,
    counts: PartCounts,
    windows: tuple[int, ...] = (0,),
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the parts of a step, a row for each window.

    Args:
        context_lens: [num_seqs] int32, contiguous; 0 marks a row of padding, which has no piece.
        counts: Of parts.
        windows: Numbers of last tokens of each context that are read; 0: all.
        groups: [NUM_FIELDS, num_seqs] int32, contiguous; sequences that share what they begin with, in the
            row of window 0. None: nobody shares.

    Returns:
        [num_windows, 2 * all + 2 + 5 * num_seqs] int32: the unit at which each part begins, and where the
        last one ends; the group or sequence in which each begins, num_seqs where nothing is left for it; the
        number of units that are read for groups. Then of the sequences: the units at which what each reads
        for itself begins; the slots of their first pieces, and the numbers of pieces, which lie in one part
        and in one slot after the other, those of the group first; what is added to a part for the slot of the
        piece that a sequence reads for itself there, and for that of its group. Units are counted over all
        groups and then all sequences, one behind the other; a part has either.
    """
    num_seqs = context_lens.shape[0]
    parts = context_lens.new_empty((len(windows), 2 * counts.all + 2 + SEQ_NUMBERS * num_seqs))
    padded = max(2, triton.next_power_of_2(num_seqs))
    for row, window in zip(parts, windows, strict=True):
        _cut[(counts.all // AT_ONCE + 1,)](
            context_lens, row, context_lens if groups is None else groups, num_seqs, *counts, WINDOW=window,
            SHARES=groups is not None and not window, SEQS_PAD=padded, AT_ONCE=AT_ONCE,
            num_warps=min(16, max(2, padded // 16)),
        )  # fmt: skip
    return parts


def count_slots(count: int, num_seqs: int, members: int = 1) -> int:
    """Return the most pieces that all sequences have, of `count` parts and groups of `members` at most."""
    for_groups = members * (count + num_seqs // 2) if members > 1 else 0
    return count + num_seqs + for_groups


def count_of(parts: torch.Tensor, num_seqs: int) -> int:
    """Return the number of parts in a row of `decode_parts`."""
    return (parts.shape[0] - 2 - SEQ_NUMBERS * num_seqs) // 2


@triton.jit
def _first_read(length, WINDOW: tl.constexpr):
    """Return where the reading of a context begins, a multiple of `UNIT`."""
    if WINDOW > 0:
        return tl.maximum(length - WINDOW, 0) // UNIT * UNIT
    return length * 0


@triton.jit
def _cut(
    context_lens,  # [num_seqs]
    parts,  # [2 * count + 2 + 5 * num_seqs]
    groups,  # [NUM_FIELDS, num_seqs]
    num_seqs,
    count,
    apart,
    WINDOW: tl.constexpr,
    SHARES: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    seqs = tl.arange(0, SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    first_read = _first_read(lens, WINDOW)
    read, group_at, group_ends = 0 * seqs, 0 * seqs, 0 * seqs
    if SHARES:
        read, group_at, group_ends = _groups_of(groups, num_seqs, seqs, is_seq)
        first_read = read * UNIT
    units = tl.cdiv(lens - first_read, UNIT)
    ends = tl.cumsum(units, 0)
    begins = ends - units
    total = tl.maximum(tl.sum(units, 0), 1)
    shared = tl.max(group_ends, 0)
    for_groups = _parts_for_groups(shared, total, count)
    used_by_groups = tl.minimum(for_groups, shared)
    for_all = count
    apart = tl.maximum(apart * (count - for_groups) // count, 1)
    count -= for_groups
    used = tl.minimum(total, count)
    shares, is_apart = _shares_of(units, total, used, count, apart)
    behind = tl.cumsum(shares, 0)
    part = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    of_group = part < for_groups
    own_part = part - for_groups
    piece = own_part[:, None] - (behind - shares)[None, :]
    is_own = (piece >= 0) & (piece < shares[None, :])
    own = begins[None, :] + piece * units[None, :] // tl.maximum(shares, 1)[None, :]
    is_behind = own_part >= tl.sum(shares, 0)
    own = tl.sum(tl.where(is_own, own, 0), 1) + tl.where(is_behind, tl.sum(units, 0), 0)
    begin = tl.where(is_apart, own, tl.minimum(own_part, used) * tl.sum(units, 0) // used)
    first = tl.sum(((ends[None, :] <= begin[:, None]) & is_seq[None, :]).to(tl.int32), 1)
    group_begin, first_group = _group_at(part, used_by_groups, shared, group_ends)
    tl.store(parts + part, tl.where(of_group, group_begin, shared + begin), mask=part <= for_all)
    tl.store(parts + for_all + 1 + part, tl.where(of_group, first_group, first), mask=part < for_all)
    if tl.program_id(0) == 0:
        before, base = tl.where(is_apart, 0, begins), tl.where(is_apart, behind - shares, 0)
        rate, per = tl.where(is_apart, shares, used), tl.where(is_apart, tl.maximum(units, 1), total)
        own_first, own_pieces = _pieces_of(units, for_groups + base, before, rate, per)
        group_first, group_pieces = _pieces_of(read, 0, group_at, used_by_groups, tl.maximum(shared, 1))
        pieces = group_pieces + own_pieces
        slots = tl.cumsum(pieces, 0) - pieces
        tl.store(parts + 2 * for_all + 1, shared)
        of_seq = parts + 2 * for_all + 2 + seqs
        tl.store(of_seq, shared + begins, mask=is_seq)
        tl.store(of_seq + num_seqs, slots, mask=is_seq)
        tl.store(of_seq + 2 * num_seqs, pieces, mask=is_seq)
        tl.store(of_seq + 3 * num_seqs, slots + group_pieces - own_first, mask=is_seq)
        tl.store(of_seq + 4 * num_seqs, slots - group_first, mask=is_seq)


@triton.jit
def _group_at(part, used, shared, group_ends):
    """Return where each of the `used` parts of groups begins, and the group in which it does."""
    begin = tl.minimum(part, used) * shared // tl.maximum(used, 1)
    is_before = (group_ends > 0)[None, :] & (group_ends[None, :] <= begin[:, None])
    return begin, tl.sum(is_before.to(tl.int32), 1)


@triton.jit
def _pieces_of(units, base, before, rate, per):
    """Return in which part each sequence's `units` behind `before` begin, and the number of their pieces.

    Of `per` units the parts behind `base` have `rate`."""
    first = base + ((before + 1) * rate - 1) // per
    last = base + ((before + units) * rate - 1) // per
    is_there = units > 0
    return tl.where(is_there, first, 0), tl.where(is_there, last - first + 1, 0)


@triton.jit
def _parts_for_groups(shared, total, count):
    """Return how many parts groups have: as large a share as of the units that are read."""
    parts = (count * shared + (shared + total) // 2) // (shared + total)
    return tl.where(shared > 0, tl.minimum(tl.maximum(parts, 1), count - 1), 0)


@triton.jit
def _shares_of(units, total, used, count, apart):
    """Return the parts that each sequence has if it is cut for itself, and whether it is."""
    num_cut = tl.maximum(tl.sum((units > 0).to(tl.int32), 0), 1)
    shares = tl.minimum(tl.maximum(units * apart // total, 1), tl.maximum(count // 2, 1))
    shares = tl.minimum(shares, units)
    longest = tl.max(tl.cdiv(units, tl.maximum(shares, 1)), 0)
    is_short = longest <= tl.cdiv(total, used) + PIECE_UNITS + count // (JOINED_PIECES * num_cut)
    return shares, is_short & (tl.sum(shares, 0) <= count)


@triton.jit
def _groups_of(groups, num_seqs, seqs, is_seq):
    """Return the units that are read for each sequence's group, where they begin, and where groups end."""
    read = tl.load(groups + seqs, mask=is_seq, other=0) // UNIT
    at = tl.load(groups + num_seqs + seqs, mask=is_seq, other=0)
    return read, at, tl.load(groups + 3 * num_seqs + seqs, mask=is_seq, other=0)


@triton.jit
def _part_of(parts, part, count):
    """Return the units at which a part begins and ends, and the sequence in which it begins."""
    return tl.load(parts + part), tl.load(parts + part + 1), tl.load(parts + count + 1 + part)


@triton.jit
def _sequence_of(parts, context_lens, seq, count, num_seqs):
    """Return the unit at which a sequence begins, and its length; of one past the last, any."""
    seq = tl.minimum(seq, num_seqs - 1)
    return tl.load(parts + 2 * count + 2 + seq), tl.load(context_lens + seq)


@triton.jit
def _shared_units(parts, count):
    """Return the units that are read for groups, which come before those of sequences."""
    return tl.load(parts + 2 * count + 1)


@triton.jit
def _slots_of(parts, seq, count, num_seqs):
    """Return the first slot of a sequence's pieces, and their number."""
    at = parts + 2 * count + 2 + num_seqs + seq
    return tl.load(at), tl.load(at + num_seqs)


@triton.jit
def _own_slot(parts, seq, part, count, num_seqs):
    """Return the slot of a piece that `seq` reads for itself, int64."""
    return (tl.load(parts + 2 * count + 2 + 3 * num_seqs + seq) + part).to(tl.int64)


@triton.jit
def _group_slot(parts, seqs, part, count, num_seqs, mask):
    """Return the slots of a piece that is read for a group, int64, one for each of `seqs`."""
    at = parts + 2 * count + 2 + 4 * num_seqs + seqs
    return (tl.load(at, mask=mask, other=0) + part).to(tl.int64)
