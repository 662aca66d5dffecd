"""Checksums of blocks on the device: launcher and kernel.

    sum over the words i of a range, modulo 2^64:  (low_i + key_i) * (high_i + other_key_i) + word_i

Every word is multiplied with a key of its place, so words that changed places change the sum; the word itself
is added, so that a factor of zero hides nothing. The sum of a block is that of its parts in any order:
programs add theirs with an atomic. A rank that has some of the layers and heads of a block sums its words by
the keys of their places in the whole block (`Spread`), so the sums of all ranks add up to the whole's.

Host code sums with xxh3 (`base/checksum.py`), which goes through its input in one order, so no GPU computes
it at the rate of its memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from base.kv_layout import Spread

TILE_WORDS = 4096
"""Words of each program: 32 KiB, 32 words a thread."""

KEY_STEP = 0x9E3779B1
OTHER_KEY = 0x85EBCA77


def sum_words(
    words: torch.Tensor,
    block_ids: torch.Tensor,
    first_word: int,
    num_words: int,
    places: Spread | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums [num_ids] int64 of words [first_word, first_word + num_words) of blocks.

    Args:
        words: [num_blocks, block_words] int64, contiguous; fewer than 2^31 words a block.
        block_ids: [num_ids] int32 on the same device; within `words`, which is not checked.
        places: Places of these words in the whole block, in words; None: they are where they lie in `words`.
        sums: Added to and returned; None: of nothing.

    Raises ValueError for a shape or dtype that the kernel does not take."""
    if words.dtype != torch.int64 or words.dim() != 2 or not words.is_contiguous():
        raise ValueError("words must be contiguous [num_blocks, block_words] int64")
    if block_ids.dtype != torch.int32 or block_ids.dim() != 1:
        raise ValueError("block_ids must be [num_ids] int32")
    if not (0 <= first_word < first_word + num_words <= words.shape[1] < 2**31):
        raise ValueError(f"words {first_word} to {first_word + num_words} are not in a block")
    places = places or Spread(first_word, num_words, 1, 0, num_words)
    if sums is None:
        sums = torch.zeros(len(block_ids), dtype=torch.int64, device=words.device)
    if len(block_ids):
        grid = (len(block_ids), triton.cdiv(num_words, TILE_WORDS))
        _sum_tile[grid](
            words, block_ids, sums, words.shape[1], first_word, num_words,
            places.start + places.column, places.run, places.stride, SPREAD=places.run < num_words,
            STEP=KEY_STEP, OTHER=OTHER_KEY, TILE=TILE_WORDS, num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit
def _sum_tile(
    words,  # [num_blocks, block_words]
    block_ids,  # [num_ids]
    sums,  # [num_ids]
    block_words,
    first_word,
    num_words,
    first_place,
    run,
    stride,
    SPREAD: tl.constexpr,  # otherwise one run, and nothing is divided
    STEP: tl.constexpr,
    OTHER: tl.constexpr,
    TILE: tl.constexpr,
):
    item = tl.program_id(0)
    block = tl.load(block_ids + item).to(tl.int64)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = offset < num_words
    place = first_place + offset
    if SPREAD:
        place = first_place + offset // run * stride + offset % run
    word = tl.load(words + block * block_words + first_word + offset, mask=inside, other=0)
    key = place.to(tl.uint32) * STEP
    low = word.to(tl.uint32) + key
    high = (word >> 32).to(tl.uint32) + (key ^ OTHER)
    term = (low.to(tl.uint64) * high.to(tl.uint64)).to(tl.int64) + word
    tl.atomic_add(sums + item, tl.sum(tl.where(inside, term, 0)))
