"""Take out of rows of logits what grammars do not allow: launcher and kernel.

A mask has a bit for each token, so a row of 128,256 tokens comes to the device as 16 KB. What is not allowed
becomes minus infinity in place; what is allowed is neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096
"""Number of tokens that a program looks at."""


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Give minus infinity to each token that the mask of its row does not allow.

    Args:
        logits: [num_rows, vocab_size], a floating dtype, rows contiguous.
        rows: [num_masks] int64; the row that each mask is for.
        masks: [num_masks, >= vocab_size / 32] int32, contiguous; bit `i` of a row, counted from the lowest of
            its first word, is whether token `i` is allowed.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    vocab_size = logits.shape[1]
    if masks.dtype != torch.int32 or not masks.is_contiguous() or masks.shape[1] * 32 < vocab_size:
        raise ValueError(f"masks must be contiguous int32 of at least {vocab_size} bits a row")
    if rows.dtype != torch.int64 or rows.shape != masks.shape[:1]:
        raise ValueError(f"rows must be [{len(masks)}] int64")
    if logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError("logits must be of a floating dtype, and those of a row contiguous")
    if len(rows):
        grid = (len(rows), triton.cdiv(vocab_size, TILE))
        _mask_tile[grid](logits, rows, masks, logits.stride(0), masks.stride(0), vocab_size, TILE=TILE)


@triton.jit
def _mask_tile(logits, rows, masks, logits_stride, masks_stride, vocab_size, TILE: tl.constexpr):
    index = tl.program_id(0)
    row = tl.load(rows + index)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token = tokens < vocab_size
    words = tl.load(masks + index * masks_stride + tokens // 32, mask=is_token, other=0)
    is_allowed = (words >> (tokens % 32)) & 1
    tl.store(logits + row * logits_stride + tokens, float("-inf"), mask=is_token & (is_allowed == 0))
