"""Parts of a step of decoding: the contexts of its sequences, cut into parts of about equal length.

`paged_decode` gives each part to a program of its own. How many parts a sequence has follows from all lengths
together, and is found on the device, once for all layers of a step: a CUDA graph has a fixed number of
programs, and a long context among short ones would be left to one of them (12,000 tokens take a program 0.5
ms a layer).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SPLITS = tl.constexpr(32)
"""Most parts of a sequence. At batch 1, 8 KV heads and 1,088 tokens 32 take 8.0 us, 64 8.4 (H200,
2026-11-21)."""

FEW_HEADS = 128
"""KV heads of all sequences up to which a step takes as long as one program with its part."""

PROGRAMS = 384, 512
SCALED_PROGRAMS = 512, 512
"""Programs with work, among which all contexts are divided, in steps of few heads and of more; the latter
for KV of 8 bits.

One H200, 8 KV heads of 128, equal lengths of 1,090: best at batch 8 are 6 parts (14.9 us, 8 parts 16.3), at
64 one (69.2 us, two 76.1). 384 are three for each multiprocessor, all of which are under way at once."""

LEAST_TOKENS = 64
"""Least length of a part."""


def num_items(num_seqs: int, num_kv_heads: int, programs: int = PROGRAMS[1]) -> int:
    """Return the largest number of parts that any lengths make."""
    return num_seqs + -(-programs // num_kv_heads)


def decode_parts(context_lens: torch.Tensor, num_kv_heads: int, programs: int = PROGRAMS[1]) -> torch.Tensor:
    """Return the parts of a step.

    Args:
        context_lens: [num_seqs] int32, contiguous; 0 marks a row of padding, which has no part.
        num_kv_heads: Each has a program for each part.

    Returns:
        [num_items + 2 * num_seqs] int32: for each part its sequence times `MAX_SPLITS` plus its index in that
        sequence, -1 where there is none; then for each sequence its number of parts, and its first.
    """
    num_seqs = context_lens.shape[0]
    num_places = num_items(num_seqs, num_kv_heads, programs)
    parts = context_lens.new_empty(num_places + 2 * num_seqs)
    _cut[(1,)](
        context_lens, parts, num_seqs, num_places, LEAST_TOKENS,
        SEQS_PAD=max(2, triton.next_power_of_2(num_seqs)), ITEMS_PAD=triton.next_power_of_2(num_places),
    )  # fmt: skip
    return parts


@triton.jit
def _cut(
    context_lens,  # [num_seqs]
    parts,  # [num_items + 2 * num_seqs]
    num_seqs,
    num_items,
    least,
    SEQS_PAD: tl.constexpr,
    ITEMS_PAD: tl.constexpr,
):
    seqs = tl.arange(0, SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    fair = tl.maximum(tl.cdiv(tl.sum(lens, 0), num_items - num_seqs), least)
    # rounded: cut in two, a context a little longer than the others takes longer than whole
    counts = tl.minimum(tl.maximum((lens + fair // 2) // fair, 1), MAX_SPLITS)
    counts = tl.where(lens > 0, counts, 0)
    firsts = tl.cumsum(counts, 0) - counts
    tl.store(parts + num_items + seqs, counts, mask=is_seq)
    tl.store(parts + num_items + num_seqs + seqs, firsts, mask=is_seq)
    for split in range(MAX_SPLITS):
        tl.store(parts + firsts + split, seqs * MAX_SPLITS + split, mask=split < counts)
    items = tl.arange(0, ITEMS_PAD)
    tl.store(parts + items, -1, mask=(items >= tl.sum(counts, 0)) & (items < num_items))
