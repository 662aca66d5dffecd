"""The rule of attention: how scores are made, and the plain definition.

Written to be read, in float32 and one sequence at a time. Tests hold the fast code, on a CPU or in a kernel,
to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How the scores of one layer are made.

    The soft cap is Gemma 2's (arXiv 2408.00118, section 2). Sinks are gpt-oss's: a learned logit for each
    head that takes part in the softmax and has no value.
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
