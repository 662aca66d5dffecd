"""Memory of a GPU that steps hold beside weights and KV, calculated before there is a cache.

Of four kinds: what a layer has at its widest, of every token of the largest step and, in the graphs' own
pool, of the largest captured one; logits, of which every graph keeps its own; the keys and values of the
longest sequence that a long chunk attends to; and, in the graphs' pool, those that are made of latents.
Logits are of last tokens alone, so that a chunk adds one row of the vocabulary however long it is.

It is for cards on which a tenth of the memory is less. What the allocator wastes is not in it.
"""

from __future__ import annotations

from typing import Any

import torch

from base.config import EngineConfig
from base.kv_layout import KvLayout
from engine.cuda_graph import (
    GRAPH_CHUNKS,
    PROMPT_CHUNKS,
    PROMPT_TOKENS,
    decode_ladder,
    mixed_ladder,
    prompt_ladder,
)
from engine.kernels.expanded_latents import workspace_keys
from engine.long_chunks import MIN_TOKENS, padded_tokens

FLOAT_BYTES = 4


def step_bytes(
    text: Any, layout: KvLayout, config: EngineConfig, dtype: torch.dtype, context_tokens: int
) -> int:
    """Return about how many bytes the steps of one rank hold at once.

    Args:
        text: transformers' configuration of the whole model's text.
        layout: Of the rank's blocks.
        config: Of an engine whose sizes are decided.
        dtype: As the model computes.
        context_tokens: Tokens of the longest sequence.
    """
    chunk_tokens, max_batch, vocab = config.chunk_tokens, config.max_batch, int(text.vocab_size)
    largest = padded_tokens(chunk_tokens + max_batch)
    tokens = largest + min(largest, PROMPT_TOKENS[-1])
    rows = max_batch + max(max_batch, GRAPH_CHUNKS)
    numbers = tokens * layer_width(text, layout, config.tensor_parallel)
    numbers += (rows + _captured_rows(chunk_tokens, max_batch, context_tokens)) * vocab
    if chunk_tokens >= MIN_TOKENS // 2:
        numbers += context_tokens * _seen_width(text, layout)
    key_bytes = _made_width(text, layout) * dtype.itemsize
    made_bytes = workspace_keys(context_tokens, key_bytes) * key_bytes if key_bytes else 0
    return numbers * dtype.itemsize + rows * vocab * FLOAT_BYTES + made_bytes


def layer_width(text: Any, layout: KvLayout, ranks: int) -> int:
    """Return how many numbers a rank has of each token where a layer is widest.

    That is in attention, in the product after it, or among the experts that a token goes to; beside it are
    the residual, what the layer reads and what it returns."""
    hidden = int(text.hidden_size)
    inner = getattr(text, "intermediate_size", 0) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else inner
    chosen = int(getattr(text, "num_experts_per_tok", 0) or 0)
    expert = int(getattr(text, "moe_intermediate_size", 0) or inner)
    # queries as they are projected, turned and laid out for cuDNN, beside the same of K and V
    attention = int(text.num_attention_heads) // ranks * layout.fields[0].width * 3 + _seen_width(
        text, layout
    )
    return max(attention, 3 * int(inner) // ranks, chosen * (3 * expert + 2 * hidden)) + 4 * hidden


def _seen_width(text: Any, layout: KvLayout) -> int:
    """Return the numbers of K and V that attention of a long chunk reads of each token."""
    if getattr(text, "kv_lora_rank", None):
        return layout.num_heads * int(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    return layout.num_heads * 2 * layout.fields[0].width


def _made_width(text: Any, layout: KvLayout) -> int:
    """Return the numbers of K and V that are made of each token's latents; 0: it has none."""
    if not getattr(text, "kv_lora_rank", None):
        return 0
    return layout.num_heads * int(text.qk_nope_head_dim + text.v_head_dim)


def _captured_rows(chunk_tokens: int, max_batch: int, max_prompt: int) -> int:
    """Return the rows of logits that all graphs keep."""
    mixed = sum(min(max_batch, size) + GRAPH_CHUNKS for size in mixed_ladder(chunk_tokens + max_batch))
    prompts = len(prompt_ladder(min(chunk_tokens, max_prompt)))
    return sum(decode_ladder(max_batch)) + mixed + PROMPT_CHUNKS * prompts
