"""K and V in 8 bits (e4m3), with a scale for each block and head: the definition.

The scale of a block's K, and of its V, is the power of two below the largest number of its first token. That
token alone decides it, so a block's bytes do not depend on the chunks or steps that wrote it, and no token
that is written later changes another's. Numbers are stored over their scale: those of the first token are
below 2, of 448 that e4m3 has, and a token 200 times as large still fits; larger ones are cut off. A token 64
times as small loses no digit: e4m3 is a floating format, so room costs nothing.

A power of two takes no digit off either, so a scale is applied after a product as exactly as before it.
"""

from __future__ import annotations

import torch

from base.errors import ConfigError
from base.kv_layout import KvField, KvLayout

SCALED_DTYPE = "float8_e4m3fn"

LARGEST = 448.0
"""The largest number of e4m3."""

SCALE_WIDTH = 4
"""float32 of each head and block: K's scale, V's, and two that make it 16 bytes."""

HIGHEST_EXPONENT = 253
"""The largest exponent whose scale has an inverse, as float32 stores it."""

NOT_HEADS = "kv_dtype: fp8 is for K and V of heads, and this model caches something else; say auto"


def scaled_layout(layout: KvLayout) -> KvLayout:
    """Return the layout of the same K and V in 8 bits; raises ConfigError for a layout that has others."""
    if [field.name for field in layout.fields] != ["key", "value"]:
        raise ConfigError(NOT_HEADS)
    key, value = layout.fields
    if value.width % 2:
        raise ConfigError(f"kv_dtype: fp8 takes numbers in pairs, not heads of {value.width}; say auto")
    fields = (
        KvField("key", key.width, SCALED_DTYPE),
        KvField("value", value.width, SCALED_DTYPE),
        KvField("scale", SCALE_WIDTH, "float32", is_per_token=False),
    )
    return KvLayout(layout.num_layers, layout.num_heads, layout.block_size, fields)


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the scale of each head for blocks that begin with `rows` [..., heads, head_dim], float32."""
    largest = rows.float().abs().amax(-1)
    exponent = (largest.view(torch.int32) >> 23).clamp(max=HIGHEST_EXPONENT)
    return torch.where(exponent > 0, (exponent << 23).view(torch.float32), 1.0)


def write_scaled(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write each token's K and V to its slot of one layer, and the scales of blocks that begin.

    Args:
        key, value: [num_tokens, num_kv_heads, <= head_dim]
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim] of 8 bits.
        scales: [num_blocks, num_kv_heads, SCALE_WIDTH] float32.
        slots: [num_tokens] int64; tokens of one block follow each other.
    """
    block_size = kv_cache.shape[2]
    block_ids, offsets = slots // block_size, slots % block_size
    # The row in which a token's block begins, if this step has it.
    first = torch.arange(len(slots), device=slots.device) - offsets
    begins_here = (first >= 0) & (slots[first.clamp(min=0)] == slots - offsets)
    begins = offsets == 0
    for which, rows in enumerate((key, value)):
        own = scales_of(rows)
        scale = torch.where(begins_here[:, None], own[first.clamp(min=0)], scales[block_ids, :, which])
        scales[block_ids[begins], :, which] = own[begins]
        numbers = (rows.float() / scale[:, :, None]).clamp(-LARGEST, LARGEST)
        kv_cache[block_ids, which, offsets, :, : rows.shape[-1]] = numbers.to(kv_cache.dtype)


def plain(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return blocks' rows [..., block_size, heads, head_dim] as numbers; `scale` is [..., heads]."""
    return (rows.float() * scale[..., None, :, None]).to(dtype)
