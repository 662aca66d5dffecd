"""Read K and V of 8 bits out of blocks, as numbers: launcher and kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.paged_layer import require_scales
from engine.kernels.scaled_rows import SCALE_WIDTH

SPAN = 4096
"""Numbers that a program reads."""


def read_scaled(
    kv_cache: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of some blocks of one layer, each [num_blocks * block_size, heads, head_dim] `dtype`.

    Args:
        kv_cache: [blocks of the cache, 2, block_size, heads, head_dim] float8_e4m3fn; a block is contiguous.
        scales: [blocks of the cache, heads, SCALE_WIDTH] float32.
        blocks: [num_blocks] int32 or int64.

    Raises ValueError for a shape, stride or dtype that the kernel does not take."""
    _, _, block_size, heads, dim = kv_cache.shape
    require_scales(kv_cache, dtype, scales, "output")
    if not kv_cache[:1].is_contiguous():
        raise ValueError("a block must be contiguous")
    if blocks.dim() != 1 or blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError("blocks must be [num_blocks] int32 or int64")
    numbers = block_size * heads * dim
    both = torch.empty((2, len(blocks) * block_size, heads, dim), dtype=dtype, device=kv_cache.device)
    if len(blocks):
        _read_span[(len(blocks), triton.cdiv(numbers, SPAN), 2)](
            kv_cache, scales, blocks, both, numbers, kv_cache.stride(0), scales.stride(0),
            HEADS=heads, DIM=dim, SPAN=SPAN, num_warps=8,
        )  # fmt: skip
    return both[0], both[1]


@triton.jit
def _read_span(
    kv_cache,  # [blocks of the cache, 2, numbers]
    scales,  # [blocks of the cache, HEADS, SCALE_WIDTH]
    blocks,  # [num_blocks]
    both,  # [2, num_blocks, numbers]
    numbers,  # of one block's K
    block_stride,
    scale_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
):
    which = tl.program_id(2)
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = place < numbers
    rows = tl.load(kv_cache + block * block_stride + which * numbers + place, mask=inside, other=0.0)
    scale_at = scales + block * scale_stride + place // DIM % HEADS * SCALE_WIDTH + which
    scale = tl.load(scale_at, mask=inside, other=0.0)
    target = which.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(both + target * numbers + place, rows.to(tl.float32) * scale, mask=inside)
