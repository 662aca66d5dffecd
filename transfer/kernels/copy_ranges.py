"""Copy many scattered ranges with one kernel.

Definition: for each row (source, target, words) of the table, copy `words` 8-byte words
from address `source` to address `target`. Addresses are whatever this GPU can reach: its
own memory, a peer GPU's, imported, or pinned host memory. Rows do not overlap.

One launch for a batch, because a copy call for each 64 KiB reaches 5 GB/s and a kernel
that gathers reaches the link's rate (H200, 2026-11-21). The grid is rows x tiles of the
longest row, so rows should be of similar length.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

WORD_BYTES = 8
ALIGNMENT = 16
"""Addresses and lengths: the kernel moves 16 bytes a thread at a time."""
ROW_WORDS = 3


@triton.jit
def copy_ranges_kernel(table, tile_words: tl.constexpr):
    """table: [rows, 3] int64 (source, target, words)."""
    row = table + tl.program_id(0) * 3
    source = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(tl.int64))
    target = tl.multiple_of(tl.load(row + 1), 16).to(tl.pointer_type(tl.int64))
    num_words = tl.multiple_of(tl.load(row + 2), 2)
    at = tl.program_id(1).to(tl.int64) * tile_words + tl.arange(0, tile_words)
    inside = at < num_words
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def copy_ranges(table: Any, max_words: int, tile_words: int = 2048, num_warps: int = 8) -> None:
    """Launch the copy on the current stream.

    Args:
        table: [rows, 3] int64 on the device that copies; see the head of the file.
            Addresses are multiples of 16, words of 2.
        max_words: The most words of any row.
        tile_words: Words that one program moves; a power of two.
        num_warps: Of one program.
    """
    grid = (table.shape[0], triton.cdiv(max_words, tile_words))
    copy_ranges_kernel[grid](table, tile_words=tile_words, num_warps=num_warps)
