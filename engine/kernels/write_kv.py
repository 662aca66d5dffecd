"""Write the K and V of new tokens into the paged cache, or their rows of one field: launchers and kernels.

One program writes one token, K and V of all heads: a layer slice keeps both within one block, so the token's
rows are two runs of contiguous bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.paged_layer import require_new_rows
from engine.kernels.scaled_rows import SCALE_WIDTH, _scale_of, _to_scaled


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write each token's K and V to its slot of one layer, as `attention.py : write_kv`.

    Heads and head_dim of the cache must be contiguous, and head_dim of K and V. No two slots, int32 or int64,
    are equal, but for negative ones, whose tokens are padding and not written.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    num_tokens, num_kv_heads, head_dim = key.shape
    require_new_rows(kv_cache, key, value, scales)
    if kv_cache.stride(3) != head_dim:
        raise ValueError("the heads of a cached token must be contiguous")
    if slots.shape != (num_tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError("slots must be [num_tokens] int32 or int64")
    if num_tokens == 0:
        return
    _write_token[(num_tokens,)](
        key, value, kv_cache, slots, key if scales is None else scales, *key.stride()[:2],
        *value.stride()[:2], *kv_cache.stride()[:3], 0 if scales is None else scales.stride(0),
        SCALED=scales is not None, BLOCK_SIZE=kv_cache.shape[2],
        HEADS=num_kv_heads, HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


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
def _write_token(
    key,  # [num_tokens, HEADS, DIM]
    value,  # [num_tokens, HEADS, DIM]
    kv_cache,  # [num_blocks, 2, BLOCK_SIZE, HEADS, DIM]
    slots,  # [num_tokens]
    scales,  # [num_blocks, HEADS, SCALE_WIDTH]
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    value_stride,
    token_stride,
    scale_stride,
    SCALED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = (heads < HEADS) & (dims < DIM)
    key += heads * key_head_stride + dims
    value += heads * value_head_stride + dims
    k = tl.load(key + token * key_token_stride, mask=mask)
    v = tl.load(value + token * value_token_stride, mask=mask)
    if SCALED:
        # The token that its block begins with decides: another program writes it, in this launch or before.
        offset = slot % BLOCK_SIZE
        first = token - offset
        begins = tl.load(slots + tl.maximum(first, 0)).to(tl.int64) == slot - offset
        begins = begins & (first >= 0)
        scale_at = scales + slot // BLOCK_SIZE * scale_stride + tl.arange(0, HEADS_PAD) * SCALE_WIDTH
        is_head = tl.arange(0, HEADS_PAD) < HEADS
        if begins:
            k_scale = _scale_of(tl.load(key + first * key_token_stride, mask=mask, other=0.0))
            v_scale = _scale_of(tl.load(value + first * value_token_stride, mask=mask, other=0.0))
        else:
            k_scale = tl.load(scale_at, mask=is_head, other=1.0)
            v_scale = tl.load(scale_at + 1, mask=is_head, other=1.0)
        if offset == 0:
            tl.store(scale_at, k_scale, mask=is_head)
            tl.store(scale_at + 1, v_scale, mask=is_head)
        k = _to_scaled(k, k_scale[:, None], kv_cache)
        v = _to_scaled(v, v_scale[:, None], kv_cache)
    target = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    target += heads * DIM + dims
    tl.store(target, k, mask=mask)
    tl.store(target + value_stride, v, mask=mask)


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
