"""What attention computes, once: the rule that scores follow and its plain-torch definition.

Decode and prefill are the same function of different shapes, so both kernel files take
an `AttentionRule` and both definitions call `attend`. It is written to be read, in
float32 and one sequence at a time; it is what the kernels are held to, not a fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How the scores of one layer are made.

    Source of the soft cap: Gemma 2 (arXiv 2408.00118, section 2); of sinks: gpt-oss, a
    learned logit for each head that takes part in the softmax and has no value.
    """

    scale: float
    """Multiplies query . key."""
    sliding_window: int = 0
    """A query sees itself and the `sliding_window - 1` positions before it; 0: all."""
    soft_cap: float = 0.0
    """Scores become soft_cap * tanh(score / soft_cap); 0: they stay."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one sequence's last queries over all of its keys.

    Args:
        query: [num_queries, num_heads, head_dim]; the last positions of the sequence.
        key, value: [context_len, num_kv_heads, head_dim], context_len >= num_queries.
        sinks: [num_heads] or None.

    Returns:
        [num_queries, num_heads, head_dim], dtype of `query`; computed in float32.
    """
    num_queries, num_heads, _ = query.shape
    context_len, num_kv_heads, _ = key.shape
    key = key.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * rule.scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    key_at = torch.arange(context_len, device=query.device)
    query_at = key_at[context_len - num_queries :, None]
    seen = key_at <= query_at
    if rule.sliding_window:
        seen &= key_at > query_at - rule.sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def gathered(kv_cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> torch.Tensor:
    """Return one sequence's K and V out of a paged layer, [2, context_len, num_kv_heads, head_dim]."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-context_len // block_size)].long()
    return kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len]


def require_paged_layer(
    kv_cache: torch.Tensor, query: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> None:
    """Raise ValueError unless a layer of the cache, queries and a batch's tables fit each other.

    Args:
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], any block stride.
        query: [num_tokens, num_heads, head_dim]
        block_tables: [num_seqs, max_blocks] int32
        context_lens: [num_seqs] int32
    """
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(f"kv_cache is {tuple(kv_cache.shape)}, not one layer of a paged cache")
    if query.dim() != 3 or query.shape[2] != kv_cache.shape[4]:
        raise ValueError(f"query {tuple(query.shape)} does not fit head_dim {kv_cache.shape[4]}")
    if query.shape[1] % kv_cache.shape[3]:
        raise ValueError(f"{query.shape[1]} heads do not share {kv_cache.shape[3]} KV heads evenly")
    if query.dtype != kv_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the cache {kv_cache.dtype}")
    if query.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError("head_dim must be contiguous in query and cache")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError("block_tables must be [num_seqs, max_blocks] int32 with contiguous rows")
    if context_lens.shape != block_tables.shape[:1] or context_lens.dtype != torch.int32:
        raise ValueError("context_lens must be [num_seqs] int32")


def kernel_constants(
    query: torch.Tensor, kv_cache: torch.Tensor, rule: AttentionRule, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """Return the compile-time constants that both attention kernels take."""
    return {
        "WINDOW": rule.sliding_window,
        "SOFT_CAP": rule.soft_cap > 0,
        "SINKS": sinks is not None,
        "GROUP": query.shape[1] // kv_cache.shape[3],
        "DIM": kv_cache.shape[4],
        "DIM_PAD": triton.next_power_of_2(kv_cache.shape[4]),
        "BLOCK_SIZE": kv_cache.shape[2],
    }
