"""Attention over the paged cache, behind two functions: one token each, and chunks.

They compute what `tests/engine/definitions.py : attend` defines for one sequence. What is fast on a CPU is to
gather the blocks, then torch's fused attention on what was gathered, for as many sequences at a time as leave
it in the processor's own cache: the KV of a step is then read from memory once a layer and never written.
It runs on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.scaled_kv import plain, write_scaled

GATHERED_BYTES = 2 << 20
"""K and V that are gathered at a time for each thread: what the caches near a core hold, or about that."""


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


class DecodeGroup:
    """Sequences that follow each other in a step, whose one new token each attends together.

    It lives for a step, and keeps from layer to layer what does not change.

    Args:
        sequences: Which of the step's sequences they are.
        block_tables: [num_seqs, max_blocks] of these; past a sequence's last block it is any valid block.
        context_lens: Tokens that each query sees, itself included; >= 1.
    """

    def __init__(
        self, sequences: slice, block_tables: torch.Tensor, context_lens: list[int], block_size: int
    ) -> None:
        self.sequences = sequences
        self._longest = max(context_lens)
        num_blocks = -(-self._longest // block_size)
        self.blocks = block_tables[:, :num_blocks].reshape(-1).long()
        self.num_seqs = len(context_lens)
        self._lens = torch.tensor(context_lens, device=block_tables.device)
        self._unseen: torch.Tensor | None = None
        if min(context_lens) < self._longest:
            key_at = torch.arange(num_blocks * block_size, device=block_tables.device)
            unseen = (key_at >= self._lens[:, None]) & (key_at < self._longest)
            self._unseen = unseen.flatten().nonzero()[:, 0]
        self._biases: dict[int, torch.Tensor | None] = {}

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is seen of the group's whole blocks that a `Read` gave, [seqs, heads, keys, width].

        Where another sequence is longer there are zeros: a weight of 0 hides any number but NaN, and such a
        slot may hold what an earlier sequence left there, or another one is writing.
        """
        if self._unseen is not None:
            rows.index_fill_(0, self._unseen, 0.0)
        return rows.view(self.num_seqs, -1, *rows.shape[1:])[:, : self._longest].transpose(1, 2)

    def bias(self, rule: AttentionRule, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the scores, [seqs, 1, 1, keys]; None: all see all that is gathered."""
        window = rule.sliding_window
        if self._unseen is None and not 0 < window < self._longest:
            return None
        if window not in self._biases:
            query_at = self._lens[:, None, None, None] - 1
            self._biases[window] = causal_bias(self._longest, query_at, rule, dtype)
        return self._biases[window]


def decode_groups(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, token_bytes: int
) -> list[DecodeGroup]:
    """Cut sequences into groups whose gathered tokens stay in the processor's cache.

    A lone sequence may have more.

    Args:
        block_tables: [num_seqs, max_blocks] int32.
        context_lens: [num_seqs] int32.
        token_bytes: What is gathered of one token in one layer.
    """
    most = torch.get_num_threads() * GATHERED_BYTES // token_bytes
    # The host reads the lengths, which is free on a CPU.
    lens: list[int] = context_lens.tolist()
    groups, start, longest = [], 0, 0
    for end in range(1, len(lens) + 1):
        longest = max(longest, lens[end - 1])
        if end == len(lens) or max(longest, lens[end]) * (end + 1 - start) > most:
            part = slice(start, end)
            groups.append(DecodeGroup(part, block_tables[part], lens[part], block_size))
            start, longest = end, 0
    return groups


Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gathers K and V of whole blocks [num_blocks] int64, each [tokens, heads, width]: copies."""


def heads_reader(kv_cache: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> Read:
    """Return what reads one layer [num_blocks, 2, block_size, num_kv_heads, head_dim], of any block stride.

    Args:
        scales: Those of a layer of 8 bits, as `write_kv` takes them; its numbers become `dtype`.
    """

    def read(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if scales is None:
            return gathered(kv_cache[:, 0], blocks), gathered(kv_cache[:, 1], blocks)
        rows, scale = kv_cache.view(torch.uint8)[blocks].view(kv_cache.dtype), scales[blocks]
        key, value = (plain(rows[:, which], scale[..., which], dtype).flatten(0, 1) for which in (0, 1))
        return key, value

    return read


def gathered(field: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the tokens' rows of whole blocks of a field [num_blocks, block_size, heads, width]."""
    # As two dimensions it is one copy of a run of bytes a block, three times faster than indexing five.
    return field.view(len(field), -1).index_select(0, blocks).view(-1, *field.shape[2:])


def paged_decode_attention(
    query: torch.Tensor,
    groups: list[DecodeGroup],
    read: Read,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one new token per sequence, [num_seqs, num_heads, width of V], as `query`.

    Args:
        query: [num_seqs, num_heads, head_dim]
        groups: Of all the sequences.
        read: The new tokens' K and V are written already.
        rule: Scale, sliding window and soft cap.
        sinks: [num_heads] or None.
    """
    found = []
    for group in groups:
        key, value = (group.seen(rows) for rows in read(group.blocks))
        # The heads that share a KV head are the rows of one small matrix: no K or V is repeated.
        rows = query[group.sequences].view(group.num_seqs, key.shape[1], -1, query.shape[2])
        own_sinks = None if sinks is None else sinks.view(key.shape[1], -1, 1)
        bias = group.bias(rule, query.dtype)
        found.append(attend(rows, key, value, bias, rule, own_sinks).flatten(1, 2))
    return torch.cat(found)


def paged_prefill_attention(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    read: Read,
    block_size: int,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal attention of packed chunks, [num_tokens, num_heads, width of V], as `query`.

    Args:
        query: [num_tokens, num_heads, head_dim], chunk after chunk.
        block_tables: [num_seqs, max_blocks] int32; entries past a sequence's last block are any valid block.
        query_starts: [num_seqs + 1] int32, ascending from 0.
        context_lens: [num_seqs] int32; tokens of the sequence up to the chunk's end.
        read, rule, sinks: as for `paged_decode_attention`.
    """
    found = []
    # The host reads the lengths, which is free on a CPU.
    starts = query_starts.tolist()
    sinks_of_heads = None if sinks is None else sinks[:, None, None]
    for seq, context_len in enumerate(context_lens.tolist()):
        rows = query[starts[seq] : starts[seq + 1]].transpose(0, 1)[None]  # [1, num_heads, chunk, head_dim]
        both = read(block_tables[seq, : -(-context_len // block_size)].long())
        key, value = (each[:context_len].transpose(0, 1)[None] for each in both)
        query_at = torch.arange(context_len - rows.shape[2], context_len, device=query.device)
        bias = causal_bias(context_len, query_at[None, None, :, None], rule, query.dtype)
        found.append(attend(rows, key, value, bias, rule, sinks_of_heads)[0].transpose(0, 1))
    return torch.cat(found)


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
    bias: torch.Tensor | None,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention [n, heads, queries, head_dim] over K and V [n, kv_heads, keys, head_dim].

    `sinks` must broadcast to [heads, queries, 1]. Without a bias every query sees every key.
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
    scores = (scores if bias is None else scores + bias).float()
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
