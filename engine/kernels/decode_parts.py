"""Parts of a step of decoding: the contexts of its sequences, cut into parts of about equal length.

`paged_decode` gives each part to a program of its own. How many parts a sequence has follows from all lengths
together, and is found on the device, once for all layers of a step: a CUDA graph has a fixed number of
programs, and a long context among short ones would be left to one of them (12,000 tokens take a program 0.5
ms a layer).

A device has so many programs under way at once: a wave. A wave of all of them takes as long as the memory,
but a last one of a few takes as long as a program that is nearly alone: 24 sequences of 8,300 tokens and 8
heads in three parts each are 576 programs and take 251 us where 528 are a wave, in two parts 192 us. So
several ways to cut are compared by their waves (`_waves_cost`), and the cheapest is taken. Where
waves are known and there is more than one, the longest parts begin first, so that none is alone at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_SPLITS = tl.constexpr(32)
"""Most parts of a sequence. At batch 1, 8 KV heads and 1,088 tokens 32 take 8.0 us, 64 8.4 (H200,
2026-11-21)."""

FEW_HEADS = 128
"""KV heads of all sequences up to which a step takes as long as one program with its part."""


class KernelPrograms(NamedTuple):
    """Numbers of programs that contexts are divided among."""

    wanted: int
    """Number of programs with work, about."""
    wave: int = 0
    """Number of programs that are under way at once; 0: not known."""
    alone: tuple[int, ...] = ()
    """Least cost of a wave with one, two and more programs a multiprocessor, in programs of a whole wave.

    As many numbers as a multiprocessor has programs of a whole wave."""


PROGRAMS = KernelPrograms(384), KernelPrograms(512, 528, (204, 281, 325, 438))
SCALED_PROGRAMS = KernelPrograms(512), KernelPrograms(512)
"""Programs in steps of few heads and of more; the latter for KV of 8 bits.

One H200, 8 KV heads of 128, equal lengths of 1,090: best at batch 8 are 6 parts (14.9 us, 8 parts 16.3), at
64 one (69.2 us, two 76.1). 384 are three for each multiprocessor, all of which are under way at once. A whole
wave of 528 takes 60 ns for each token of a part, and 132, 264, 396 and 400 to 440 programs by themselves 23,
32, 37 and 50 (2026-11-27)."""

OTHER_PROGRAMS = KernelPrograms(384), KernelPrograms(512)
"""Programs for heads and cards whose waves nobody measured; see `PROGRAMS`."""

MEASURED_ROW_BYTES, MEASURED_MULTIPROCESSORS = 256, 132
"""Bytes of a head's row and multiprocessors of a card of which `PROGRAMS` is true."""

LEAST_TOKENS = 64
"""Least length of a part."""

CUT_TOKENS = 128
"""Tokens that a program could read in the time that its part costs for being one of several: it is written
and joined."""

MOST_SORTED = 128
"""Most sequences whose parts begin by length. Each is compared with every other, which takes 2 us with 32 of
them, 7 with 64 and 27 with 128, once a step."""

WHOLE_WAVES = tl.constexpr(3)
"""Ways to cut that fill so many waves, and fewer, are tried."""


def num_items(num_seqs: int, num_kv_heads: int, programs: KernelPrograms = PROGRAMS[1]) -> int:
    """Return the largest number of parts that any lengths make."""
    least = num_seqs + -(-programs.wanted // num_kv_heads)
    if not programs.wave:
        return least
    best, most = _equal_cost(num_seqs * num_kv_heads, programs), least
    for waves in range(1, WHOLE_WAVES.value + 1):
        parts = waves * programs.wave // num_kv_heads // num_seqs
        if parts > 1 and (cost := _equal_cost(parts * num_seqs * num_kv_heads, programs) / parts) < best:
            best, most = cost, max(least, parts * num_seqs)
    return most


def _equal_cost(num_programs: int, programs: KernelPrograms) -> float:
    """Return what programs of equal parts cost, for each token of a part."""
    rest = (num_programs - 1) % programs.wave + 1
    each = -(-rest * len(programs.alone) // programs.wave)
    return num_programs - rest + max(programs.alone[each - 1], rest)


def decode_parts(
    context_lens: torch.Tensor, num_kv_heads: int, programs: KernelPrograms = PROGRAMS[1]
) -> torch.Tensor:
    """Return the parts of a step.

    Args:
        context_lens: [num_seqs] int32, contiguous; 0 marks a row of padding, which has no part.
        num_kv_heads: Each has a program for each part.

    Returns:
        [num_items + 2 * num_seqs] int32: for each part its sequence times `MAX_SPLITS` plus its index in that
        sequence, in the order in which they begin, -1 where there is none; then for each sequence its number
        of parts, and its first.
    """
    num_seqs = context_lens.shape[0]
    num_places = num_items(num_seqs, num_kv_heads, programs)
    parts = context_lens.new_empty(num_places + 2 * num_seqs)
    alone = [*programs.alone, 0, 0, 0, 0]
    padded = max(2, triton.next_power_of_2(num_seqs))
    sorts = programs.wave > 0 and num_seqs <= MOST_SORTED
    _cut[(1,)](
        context_lens, parts, num_seqs, num_places, -(-programs.wanted // num_kv_heads), LEAST_TOKENS,
        num_kv_heads, WAVE=programs.wave, EACH=len(programs.alone),
        ALONE_1=alone[0], ALONE_2=alone[1], ALONE_3=alone[2], ALONE_4=alone[3], CUT=CUT_TOKENS,
        SORTS=sorts, SEQS_PAD=padded, ITEMS_PAD=triton.next_power_of_2(num_places),
        num_warps=min(16, max(4, padded // 16)),
    )  # fmt: skip
    return parts


@triton.jit
def _counts(lens, fair, added):
    """Return how many parts of about `fair` tokens each sequence has; `added` rounds."""
    counts = tl.minimum(tl.maximum((lens + added) // fair, 1), MAX_SPLITS)
    return tl.where(lens > 0, counts, 0)


@triton.jit
def _waves_cost(
    lens,
    counts,
    num_heads,
    num_items,
    WAVE: tl.constexpr,
    EACH: tl.constexpr,
    ALONE_1: tl.constexpr,
    ALONE_2: tl.constexpr,
    ALONE_3: tl.constexpr,
    ALONE_4: tl.constexpr,
    CUT: tl.constexpr,
):
    """Return what the waves of these parts cost: tokens times programs of a whole wave.

    Whole waves take as long as their mean part, and the last one as its longest."""
    num_parts = tl.sum(counts, 0)
    extra = tl.where(num_parts > tl.sum((lens > 0).to(tl.int32), 0), CUT, 0)
    mean = (tl.cdiv(tl.sum(lens, 0), tl.maximum(num_parts, 1)) + extra).to(tl.int64)
    longest = (tl.max(tl.cdiv(lens, tl.maximum(counts, 1)), 0) + extra).to(tl.int64)
    num_programs = num_parts * num_heads
    rest = (num_programs + WAVE - 1) % WAVE + 1
    each = tl.cdiv(rest * EACH, WAVE)
    alone = tl.where(each == 1, ALONE_1, tl.where(each == 2, ALONE_2, tl.where(each == 3, ALONE_3, ALONE_4)))
    cost = mean * (num_programs - rest) + tl.maximum(longest * alone, mean * rest)
    return tl.where(num_parts <= num_items, cost, 1 << 62)


@triton.jit
def _cut(
    context_lens,  # [num_seqs]
    parts,  # [num_items + 2 * num_seqs]
    num_seqs,
    num_items,
    wanted,
    least,
    num_heads,
    WAVE: tl.constexpr,
    EACH: tl.constexpr,
    ALONE_1: tl.constexpr,
    ALONE_2: tl.constexpr,
    ALONE_3: tl.constexpr,
    ALONE_4: tl.constexpr,
    CUT: tl.constexpr,
    SORTS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    ITEMS_PAD: tl.constexpr,
):
    seqs = tl.arange(0, SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    total = tl.sum(lens, 0)
    fair = tl.maximum(tl.cdiv(total, wanted), least)
    # rounded: cut in two, a context a little longer than the others takes longer than whole
    counts = _counts(lens, fair, fair // 2)
    if WAVE > 0:
        best = _waves_cost(
            lens, counts, num_heads, num_items, WAVE, EACH, ALONE_1, ALONE_2, ALONE_3, ALONE_4, CUT
        )
        for waves in tl.static_range(1, WHOLE_WAVES + 1):
            fair = tl.maximum(tl.cdiv(total, tl.maximum(waves * WAVE // num_heads, 1)), least)
            others = _counts(lens, fair, 0)
            cost = _waves_cost(
                lens, others, num_heads, num_items, WAVE, EACH, ALONE_1, ALONE_2, ALONE_3, ALONE_4, CUT
            )
            counts = tl.where(cost < best, others, counts)
            best = tl.minimum(cost, best)
    firsts = tl.cumsum(counts, 0) - counts
    if SORTS:
        each = tl.cdiv(lens, tl.maximum(counts, 1))
        is_longer = each[None, :] > each[:, None]
        is_before = is_longer | ((each[None, :] == each[:, None]) & (seqs[None, :] < seqs[:, None]))
        by_length = tl.sum(tl.where(is_before, counts[None, :], 0), 1)
        firsts = tl.where(tl.sum(counts, 0) * num_heads > WAVE, by_length, firsts)
    tl.store(parts + num_items + seqs, counts, mask=is_seq)
    tl.store(parts + num_items + num_seqs + seqs, firsts, mask=is_seq)
    for split in range(MAX_SPLITS):
        tl.store(parts + firsts + split, seqs * MAX_SPLITS + split, mask=split < counts)
    items = tl.arange(0, ITEMS_PAD)
    tl.store(parts + items, -1, mask=(items >= tl.sum(counts, 0)) & (items < num_items))
