"""Write rows of new tokens into one field of the paged cache: launcher and kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_rows(rows: torch.Tensor, field: torch.Tensor, slots: torch.Tensor) -> None:
    """Write each token's row to its slot of one layer's field.

    Args:
        rows: [num_tokens, width], the last contiguous.
        field: [num_blocks, block_size, 1, width], the last contiguous.
        slots: [num_tokens] int32 or int64; negative ones are padding, and not written.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_tokens, width = rows.shape
    if field.dim() != 4 or field.shape[2:] != (1, width) or field.dtype != rows.dtype:
        raise ValueError(
            f"rows {tuple(rows.shape)} {rows.dtype} do not fit {tuple(field.shape)} {field.dtype}"
        )
    if rows.stride(1) != 1 or field.stride(3) != 1:
        raise ValueError("the last dimension must be contiguous in rows and cache")
    if slots.shape != (num_tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError("slots must be [num_tokens] int32 or int64")
    if num_tokens:
        _write_row[(num_tokens,)](
            rows, field, slots, rows.stride(0), *field.stride()[:2],
            BLOCK_SIZE=field.shape[1], WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


@triton.jit
def _write_row(
    rows,  # [num_tokens, WIDTH]
    field,  # [num_blocks, BLOCK_SIZE, WIDTH]
    slots,  # [num_tokens]
    row_stride,
    block_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, WIDTH_PAD)
    numbers = tl.load(rows + token * row_stride + dims, mask=dims < WIDTH)
    target = field + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    tl.store(target + dims, numbers, mask=dims < WIDTH)
