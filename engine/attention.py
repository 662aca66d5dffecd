"""Attention over the paged cache, behind two functions: one token each, and chunks.

They compute what `tests/engine/definitions.py : attend` defines for one sequence. What is fast on a CPU is to
gather the blocks, then torch's fused attention on what was gathered. Gathering copies the KV of a step once a
layer: 0.37 ms of 0.8 at 8 sequences of 320 tokens (SmolLM2, one thread of a 2.5 GHz Xeon, 2026-11-21).
It runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.scaled_kv import plain, write_scaled


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


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write each token's K and V to its slot of one layer.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]; where the cache's head_dim is larger, the rest of a
            slot is left as it is.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], any block stride.
        slots: [num_tokens] int64, block_id * block_size + offset.
        scales: Those of a cache of 8 bits, [num_blocks, num_kv_heads, SCALE_WIDTH]; None: it is not scaled.
    """
    if scales is not None:
        write_scaled(key, value, kv_cache, scales, slots)
        return
    block_size = kv_cache.shape[2]
    block_ids, offsets = slots // block_size, slots % block_size
    kv_cache[block_ids, 0, offsets, :, : key.shape[-1]] = key
    kv_cache[block_ids, 1, offsets, :, : value.shape[-1]] = value


def paged_decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one new token per sequence over its paged KV.

    Args:
        query: [num_seqs, num_heads, head_dim]
        kv_cache: One layer, [num_blocks, 2, block_size, num_kv_heads, head_dim], the new tokens' K and V
            written already; any block stride.
        block_tables: [num_seqs, max_blocks] int32; entries past a sequence's last block are any valid block.
        context_lens: [num_seqs] int32, >= 1; tokens the query sees, itself included.
        rule: Scale, sliding window and soft cap.
        sinks: [num_heads] or None.
        scales: Those of a layer of 8 bits, as `write_kv` takes them.

    Returns:
        [num_seqs, num_heads, head_dim], dtype of `query`.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    key, value = _gather(kv_cache, block_tables, scales, query.dtype)
    clear_unseen((key, value), context_lens)
    # The heads that share a KV head are the rows of one small matrix: no K or V is repeated.
    grouped = query.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Its shape is num_seqs, 1, 1, keys.
    bias = causal_bias(key.shape[2], context_lens.long()[:, None, None, None] - 1, rule, query.dtype)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, -1, 1)
    return attend(grouped, key, value, bias, rule, sinks).reshape(num_seqs, num_heads, head_dim)


def paged_prefill_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of packed chunks over their paged KV.

    Args:
        query: [num_tokens, num_heads, head_dim], chunk after chunk.
        query_starts: [num_seqs + 1] int32, ascending from 0.
        context_lens: [num_seqs] int32; tokens of the sequence up to the chunk's end.
        kv_cache, block_tables, rule, sinks, scales: as for `paged_decode_attention`.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`.
    """
    block_size = kv_cache.shape[2]
    output = torch.empty_like(query)
    # The host reads the lengths, which is free on a CPU.
    starts = query_starts.tolist()
    sinks_of_heads = None if sinks is None else sinks[:, None, None]
    for seq, context_len in enumerate(context_lens.tolist()):
        part = slice(starts[seq], starts[seq + 1])
        rows = query[part].transpose(0, 1)[None]  # [1, num_heads, chunk, head_dim]
        blocks = block_tables[seq : seq + 1, : -(-context_len // block_size)]
        gathered = _gather(kv_cache, blocks, scales, query.dtype)
        key, value = (rows[:, :, :context_len] for rows in gathered)
        query_at = torch.arange(context_len - rows.shape[2], context_len, device=query.device)
        bias = causal_bias(context_len, query_at[None, None, :, None], rule, query.dtype)
        attended = attend(rows, key, value, bias, rule, sinks_of_heads)
        output[part] = attended[0].transpose(0, 1)
    return output


def _gather(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of whole blocks, each [num_seqs, num_kv_heads, keys, head_dim]."""
    if scales is None:
        return gather_field(kv_cache[:, 0], block_tables), gather_field(kv_cache[:, 1], block_tables)
    blocks = block_tables.long()
    rows, scale = kv_cache.view(torch.uint8)[blocks].view(kv_cache.dtype), scales[blocks]
    key, value = (
        plain(rows[:, :, which], scale[..., which], dtype).flatten(1, 2).transpose(1, 2) for which in (0, 1)
    )
    return key, value


def gather_field(field: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """Return whole blocks of a field [num_blocks, block_size, heads, width] as [seqs, heads, keys, width]."""
    num_blocks, _, heads, width = field.shape
    # As two dimensions it is one copy of a run of bytes a block, three times faster than indexing five.
    rows = field.view(num_blocks, -1).index_select(0, block_tables.reshape(-1))
    return rows.view(len(block_tables), -1, heads, width).transpose(1, 2)


def clear_unseen(fields: tuple[torch.Tensor, ...], context_lens: torch.Tensor) -> None:
    """Set to 0 what was gathered past the end of each sequence, in fields as `gather_field` returns them.

    A weight of 0 hides any number but NaN, and such a slot may hold what an earlier sequence left there, or
    another one is writing.
    """
    num_seqs, _, num_keys, _ = fields[0].shape
    key_at = torch.arange(num_keys, device=context_lens.device)
    unseen = (key_at >= context_lens[:, None]).flatten().nonzero()[:, 0]
    for gathered in fields:
        gathered.transpose(1, 2).view(num_seqs * num_keys, -1).index_fill_(0, unseen, 0.0)


def causal_bias(
    num_keys: int, query_at: torch.Tensor, rule: AttentionRule, dtype: torch.dtype
) -> torch.Tensor:
    """Return 0 where a query sees a key and -inf elsewhere; `query_at` ends in a dimension of 1."""
    key_at = torch.arange(num_keys, device=query_at.device)
    hidden = key_at > query_at
    if rule.sliding_window:
        hidden |= key_at <= query_at - rule.sliding_window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=query_at.device)
    return bias.masked_fill_(hidden, float("-inf"))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention [n, heads, queries, head_dim] over K and V [n, kv_heads, keys, head_dim].

    `sinks` must broadcast to [heads, queries, 1].
    """
    if not rule.soft_cap and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=rule.scale, enable_gqa=grouped
        )
    heads_per_kv = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads_per_kv, dim=1), value.repeat_interleave(heads_per_kv, dim=1)
    scores = (query @ key.transpose(-1, -2)) * rule.scale
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    scores = (scores + bias).float()
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
