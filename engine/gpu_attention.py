"""Attention of one step on a GPU, as one operator that the compiler does not look into.

The operator writes the new tokens' K and V into the paged cache and attends. It is opaque
because the compiler, shown a write to the cache followed by a read, copies the whole
cache around it; and because which kernel is fastest depends on the lengths, which only
the host knows before the step runs.

A step is laid out as the tokens of all sequences one after the other: first the
sequences of one token (decode), then the chunks. What differs between steps is the
number of tokens alone: every other tensor is a buffer of fixed shape and address, so one
compiled layer serves all steps and a CUDA graph reads each step's values in place.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kernels.attention_rule import AttentionRule
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.write_kv import write_kv

WHOLE_PROMPT_TOKENS = 1024
"""From this length on, a prompt without prefix goes to cuDNN by itself."""


@torch.library.custom_op("conductor::paged_attention", mutates_args=("kv_cache",))
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    layout: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K and V, attend; return [num_tokens, num_heads * head_dim].

    Args:
        query, key, value: [num_tokens, heads, head_dim]
        kv_cache: One layer, [num_blocks, 2, block_size, num_kv_heads, head_dim].
        slots: [>= num_tokens] int64
        block_tables, context_lens: [max_seqs, max_blocks] and [max_seqs] int32
        query_starts: [max_seqs + 1] int32; of the chunks, counted from the first chunk's
            first token.
        layout: On the host, int64: number of sequences of one token, number of chunks,
            then (new tokens, context) of each chunk.
    """
    num_tokens = query.shape[0]
    single, chunks = layout[:2].tolist()
    write_kv(key, value, kv_cache, slots[:num_tokens])
    rule = AttentionRule(scale, sliding_window, soft_cap)
    if not chunks:
        output = paged_decode(
            query, kv_cache, block_tables[:num_tokens], context_lens[:num_tokens], rule, sinks
        )
        return output.flatten(1)
    lens = layout[2 : 2 + 2 * chunks].view(chunks, 2).tolist()
    output = torch.empty(num_tokens, query.shape[1], query.shape[2], dtype=query.dtype, device=query.device)
    if single:
        output[:single] = paged_decode(
            query[:single], kv_cache, block_tables[:single], context_lens[:single], rule, sinks
        )
    plain = not sliding_window and not soft_cap and sinks is None
    if plain and all(new == context and new >= WHOLE_PROMPT_TOKENS for new, context in lens):
        start = single
        for new, _ in lens:
            rows = slice(start, start + new)
            output[rows] = whole_prompt(query[rows], key[rows], value[rows], scale)
            start += new
    else:
        seqs = slice(single, single + chunks)
        output[single:] = paged_prefill(
            query[single:],
            kv_cache,
            block_tables[seqs],
            query_starts[: chunks + 1],
            context_lens[seqs],
            rule,
            sinks,
        )
    return output.flatten(1)


@paged_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))


def whole_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one prompt without prefix, by cuDNN; [tokens, heads, head_dim] each."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        output = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return output[0].transpose(0, 1)
