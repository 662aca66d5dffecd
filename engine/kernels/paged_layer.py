"""The common part of the attention kernels: checks of their arguments, and their constants."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.attention import AttentionRule
from engine.scaled_kv import SCALE_WIDTH

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E); the device has exp2 as one instruction."""


def require_paged_layer(
    kv_cache: torch.Tensor,
    query: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """Raise ValueError unless a layer of the cache, queries and a batch's tables fit each other.

    Their shapes are those of `attention.py : paged_prefill_attention`."""
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache is {tuple(kv_cache.shape)}, not one layer of a paged cache")
    if query.dim() != 3 or query.shape[2] != kv_cache.shape[4]:
        raise ValueError(f"query {tuple(query.shape)} does not fit head_dim {kv_cache.shape[4]}")
    if query.shape[1] % kv_cache.shape[3]:
        raise ValueError(f"{query.shape[1]} heads do not share {kv_cache.shape[3]} KV heads evenly")
    require_scales(kv_cache, query.dtype, scales, "query")
    if query.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError("head_dim must be contiguous in query and cache")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be [num_seqs, max_blocks] int32 with contiguous rows")
    if context_lens.shape != block_tables.shape[:1] or context_lens.dtype != torch.int32:
        raise ValueError("context_lens must be [num_seqs] int32")


def require_scales(
    kv_cache: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None, name: str
) -> None:
    """Raise ValueError unless a cache is of the dtype of `name`, or of 8 bits with scales."""
    if scales is None:
        if dtype != kv_cache.dtype:
            raise ValueError(f"{name} is {dtype}, the cache {kv_cache.dtype}")
        return
    wanted = (kv_cache.shape[0], kv_cache.shape[3], SCALE_WIDTH)
    if kv_cache.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32 or scales.shape != wanted:
        raise ValueError(
            f"scales {tuple(scales.shape)} {scales.dtype} do not fit a cache of {kv_cache.dtype}"
        )
    if scales.stride()[1:] != (SCALE_WIDTH, 1):
        raise ValueError("the scales of a block must be contiguous")


def require_new_rows(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Raise ValueError unless K and V of new tokens, [num_tokens, num_kv_heads, head_dim], fit a layer."""
    if key.shape != value.shape or key.shape[1:] != kv_cache.shape[3:]:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, cache {tuple(kv_cache.shape)} do not fit"
        )
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}")
    require_scales(kv_cache, key.dtype, scales, "key")
    if key.stride(2) != 1 or value.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError("head_dim must be contiguous in key, value and cache")


def kernel_constants(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the compile-time constants that both attention kernels take."""
    return {
        "WINDOW": rule.sliding_window,
        "SOFT_CAP": rule.soft_cap > 0,
        "SINKS": sinks is not None,
        "SCALED": scales is not None,
        "GROUP": query.shape[1] // kv_cache.shape[3],
        "DIM": kv_cache.shape[4],
        "DIM_PAD": triton.next_power_of_2(kv_cache.shape[4]),
        "BLOCK_SIZE": kv_cache.shape[2],
    }
