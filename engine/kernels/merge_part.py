"""Two attentions of the same queries over different keys become one: launcher and kernel.

A softmax over two sets of keys is the two softmaxes, each weighted by its share of the sum of exponentials.
So whoever attends in parts keeps, beside each part's result, only the logarithm of that sum (lse).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def merge_part(output: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Take `part` into `output`, and its lse into `lse`.

    Args:
        output, part: [num_rows, num_heads, head_dim], head_dim contiguous.
        lse, part_lse: [num_heads, num_rows] float32, natural; any strides.

    Raises ValueError if they do not fit each other."""
    num_rows, num_heads, head_dim = output.shape
    if part.shape != output.shape or lse.shape != part_lse.shape or lse.shape != (num_heads, num_rows):
        raise ValueError(
            f"parts do not fit: {tuple(output.shape)}, {tuple(part.shape)}, "
            f"{tuple(lse.shape)}, {tuple(part_lse.shape)}"
        )
    if output.stride(2) != 1 or part.stride(2) != 1:
        raise ValueError("head_dim must be contiguous")
    _merge_row[(num_rows,)](
        output, lse, part, part_lse,
        *output.stride()[:2], *lse.stride(), *part.stride()[:2], *part_lse.stride(),
        HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads),
        DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge_row(
    output,  # [num_rows, HEADS, DIM]
    lse,  # [HEADS, num_rows]
    part,  # [num_rows, HEADS, DIM]
    part_lse,  # [HEADS, num_rows]
    output_row_stride,
    output_head_stride,
    lse_head_stride,
    lse_row_stride,
    part_row_stride,
    part_head_stride,
    part_lse_head_stride,
    part_lse_row_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, DIM_PAD)[None, :]
    is_head = heads < HEADS
    mask = is_head[:, None] & (dims < DIM)
    lse_at = lse + row * lse_row_stride + heads * lse_head_stride
    part_lse_at = part_lse + row * part_lse_row_stride + heads * part_lse_head_stride
    ours = tl.load(lse_at, mask=is_head, other=0.0)
    theirs = tl.load(part_lse_at, mask=is_head, other=0.0)
    highest = tl.maximum(ours, theirs)
    our_sum = tl.exp(ours - highest)
    their_sum = tl.exp(theirs - highest)
    both = our_sum + their_sum
    output_at = output + row * output_row_stride + heads[:, None] * output_head_stride + dims
    part_at = part + row * part_row_stride + heads[:, None] * part_head_stride + dims
    a = tl.load(output_at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(part_at, mask=mask, other=0.0).to(tl.float32)
    merged = a * (our_sum / both)[:, None] + b * (their_sum / both)[:, None]
    tl.store(output_at, merged, mask=mask)
    tl.store(lse_at, highest + tl.log(both), mask=is_head)
