"""Copy many scattered ranges with one kernel.

Definition: for each column (source, length, target) of the table, copy `length` bytes from
address `source` to address `target`. Addresses are whatever this GPU can reach: its
own memory, a peer GPU's, imported, or pinned host memory. Rows do not overlap.

One launch for a batch, because a copy call for each 64 KiB reaches 5 GB/s and a kernel
that gathers reaches the link's rate (H200, 2026-11-21). The grid is rows x tiles of the
longest row, so rows should be of similar length.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

TILE_WORDS = 1024
"""Words of 8 bytes that one program moves."""
NUM_WARPS = 4
_WORD_BYTES = 8


@triton.jit(do_not_specialize=["num_rows"])
def copy_ranges_kernel(table, num_rows, tile_words: tl.constexpr):
    """table: [3, rows] int64, see the head of the file. One program moves one tile of one row."""
    row = table + tl.program_id(0)
    source = tl.multiple_of(tl.load(row), 16).to(tl.pointer_type(tl.int64))
    num_words = tl.multiple_of(tl.load(row + num_rows) // 8, 2)
    target = tl.multiple_of(tl.load(row + 2 * num_rows), 16).to(tl.pointer_type(tl.int64))
    at = tl.program_id(1).to(tl.int64) * tile_words + tl.arange(0, tile_words)
    inside = at < num_words
    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def copy_ranges(
    table: Any, num_rows: int, max_bytes: int, tile_words: int = TILE_WORDS, num_warps: int = NUM_WARPS
) -> Any:
    """Launch the copy on the current stream; return the compiled kernel.

    Args:
        table: [3, rows] int64 where the GPU that copies reaches it, pinned host memory too;
            see the head of the file. Addresses and lengths are multiples of 16.
        num_rows: Rows of it.
        max_bytes: The most bytes of any row; at most 1 GiB.
        tile_words: Words of 8 bytes that one program moves; a power of two.
        num_warps: Of one program.
    """
    grid = _grid(num_rows, max_bytes, tile_words)
    return copy_ranges_kernel[grid](table, num_rows, tile_words=tile_words, num_warps=num_warps)


def compiled(table: Any) -> Any:
    """Return the kernel for the current GPU, to be launched by `launch`; the table begins with zeros."""
    return copy_ranges(table, 1, _WORD_BYTES)


def launch(kernel: Any, table: Any, num_rows: int, max_bytes: int, stream: int) -> None:
    """Launch as `copy_ranges` does, on a stream of the current GPU, without asking which kernel fits.

    That question takes Triton several times as long as the launch.
    """
    kernel[_grid(num_rows, max_bytes, TILE_WORDS)](table, num_rows, TILE_WORDS, stream=stream)


def _grid(num_rows: int, max_bytes: int, tile_words: int) -> tuple[int, int, int]:
    return num_rows, -(-max_bytes // (_WORD_BYTES * tile_words)), 1
