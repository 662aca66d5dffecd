"""Latent attention (MLA): what is cached of a token is a latent and a rotary key, and no K or V of heads.

A family with latent attention makes K and V of all heads from one latent by one linear layer, `kv_b_proj`,
and gives all heads one rotary key. Both are kept, 1,152 bytes a token and layer of DeepSeek-V3 instead of
98,304, and K and V are made again (DeepSeek-V2, arXiv 2405.04434, section 2.1):

    prompts  from the latents of the whole context, once for all queries of a chunk
    decode   never: the layer's half for K goes to the query, and the half for V to what attention returns,
             which is then over one head as wide as a latent ("absorbed")

The modules stay the family's own. `show_latents` puts a `LatentHeads` in the place of each `kv_b_proj`, which
computes what that did and lets attention see what went in. What nobody uses of it a compiler leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from base.errors import ConfigError
from engine.attention import (
    AttentionRule,
    DecodeGroup,
    Read,
    gathered,
    paged_decode_attention,
    paged_prefill_attention,
)
from engine.paged_cache import PagedCache

SIGNS = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "layer_idx")
"""Attributes by which an attention module with latents is known, in all families of transformers."""

Rows = dict[str, torch.Tensor]
"""Rows that a layer keeps of each token, by the field's name: [num_tokens, heads, width], or no heads."""


class LatentHeads(nn.Module):
    """Makes K without its rotary half, and V, of the heads that a rank has, from latents."""

    def __init__(self, linear: nn.Module, nope_dim: int, value_dim: int) -> None:
        super().__init__()
        self.linear = linear
        self.nope_dim = nope_dim
        self.value_dim = value_dim
        self._latent: torch.Tensor | None = None

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        self._latent = latent
        output: torch.Tensor = self.linear(latent)
        return output

    def take(self, key: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what is cached of the tokens of the last call, and forget it.

        Args:
            key: [num_tokens, num_heads, nope_dim + rotary_dim], of which all heads have the rotary half.
        """
        latent, self._latent = self._latent, None
        assert latent is not None, "attention without a latent"
        return {"latent": latent.reshape(-1, latent.shape[-1]), "rotary_key": key[:, 0, self.nope_dim :]}

    @property
    def weight(self) -> torch.Tensor:
        """[num_heads, nope_dim + value_dim, rank]"""
        weight: Any = self.linear.weight
        return by_head(weight, self.nope_dim + self.value_dim)


class LayerCall(NamedTuple):
    """The call of one layer's attention, beside its query."""

    layer: int
    rows: Rows
    """Rows that are kept of the tokens."""
    rule: AttentionRule
    sinks: torch.Tensor | None
    heads: LatentHeads | None
    """Makes heads of latents; None: K and V of heads are kept."""


Keep = Callable[[LayerCall], tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]
"""Writes what is kept of a layer's new tokens; returns attention of single tokens, and of chunks."""


def by_head(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `kv_b_proj`'s weight as [num_heads, dim, rank]."""
    return weight.view(-1, dim, weight.shape[-1])


def show_latents(model: nn.Module) -> None:
    """Let attention see the latents of a model that has them; no effect on others, or again."""
    for module in list(model.modules()):
        if all(hasattr(module, name) for name in SIGNS):
            linear: Any = module.kv_b_proj
            if not isinstance(linear, LatentHeads):
                nope_dim, value_dim = module.qk_nope_head_dim, module.v_head_dim
                module.kv_b_proj = LatentHeads(linear, nope_dim, value_dim)  # type: ignore[arg-type]


def heads_of(module: nn.Module) -> LatentHeads | None:
    """Return what an attention module makes heads from latents with; None: it has no latents."""
    heads = getattr(module, "kv_b_proj", None)
    return heads if isinstance(heads, LatentHeads) else None


def absorbed_query(
    query: torch.Tensor, weight: torch.Tensor, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries for latents and for rotary keys, [num_tokens, num_heads, rank] and [..., rotary_dim].

    Args:
        query: [num_tokens, num_heads, nope_dim + rotary_dim]
        weight: [num_heads, nope_dim + value_dim, rank]
    """
    latent = torch.bmm(query[..., :nope_dim].transpose(0, 1), weight[:, :nope_dim])
    return latent.transpose(0, 1), query[..., nope_dim:]


def values_of(mixed: torch.Tensor, weight: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """Return values [num_tokens, num_heads, value_dim] from mixed latents [num_tokens, num_heads, rank]."""
    return torch.bmm(mixed.transpose(0, 1), weight[:, nope_dim:].transpose(1, 2)).transpose(0, 1)


def expanded(
    latents: torch.Tensor, rotary_keys: torch.Tensor, weight: torch.Tensor, nope_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K [num_tokens, num_heads, nope_dim + rotary_dim] and V [num_tokens, num_heads, value_dim].

    Args:
        latents: [num_tokens, rank]
        rotary_keys: [num_tokens, rotary_dim]
        weight: [num_heads, nope_dim + value_dim, rank]
    """
    both = (latents @ weight.flatten(0, 1).t()).view(len(latents), *weight.shape[:2])
    rotary = rotary_keys[:, None].expand(-1, weight.shape[0], -1)
    return torch.cat([both[..., :nope_dim], rotary], dim=-1), both[..., nope_dim:]


def latent_decode(
    query: torch.Tensor, groups: list[DecodeGroup], read: Read, heads: LatentHeads, rule: AttentionRule
) -> torch.Tensor:
    """Return the attention of one new token per sequence, [num_seqs, num_heads, value_dim].

    Args:
        query: [num_seqs, num_heads, nope_dim + rotary_dim]
        read: Gathers latents and rotary keys of one layer, the new tokens' written already.
        groups, rule: as for `attention.py : paged_decode_attention`.
    """

    def read_absorbed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rotary = read(blocks)
        return torch.cat([latent, rotary], dim=-1), latent

    rows = torch.cat(absorbed_query(query, heads.weight, heads.nope_dim), dim=-1)
    return values_of(paged_decode_attention(rows, groups, read_absorbed, rule), heads.weight, heads.nope_dim)


def latent_prefill(
    query: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    read: Read,
    block_size: int,
    heads: LatentHeads,
    rule: AttentionRule,
) -> torch.Tensor:
    """Return the causal attention of packed chunks, [num_tokens, num_heads, value_dim].

    Arguments are as for `latent_decode` and `attention.py : paged_prefill_attention`."""

    def read_expanded(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rotary = read(blocks)
        return expanded(latent[:, 0], rotary[:, 0], heads.weight, heads.nope_dim)

    chunks = block_tables, query_starts, context_lens
    return paged_prefill_attention(query, *chunks, read_expanded, block_size, rule)


def latents_reader(fields: tuple[torch.Tensor, torch.Tensor]) -> Read:
    """Return what reads latents and rotary keys of one layer, each [num_blocks, block_size, 1, width]."""
    return lambda blocks: (gathered(fields[0], blocks), gathered(fields[1], blocks))


def kept_latents(cache: PagedCache, slots: torch.Tensor) -> Keep:
    """Return what writes a step's latents into these slots, [num_tokens] int64, layer by layer.

    It raises ConfigError for a rule that latents are not attended to by."""
    layers = list(zip(cache.field("latent").unbind(1), cache.field("rotary_key").unbind(1), strict=True))
    block_size = cache.layout.block_size

    def keep(call: LayerCall) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        require_plain(call.rule, call.sinks)
        fields = layers[call.layer]
        for field, numbers in zip(fields, (call.rows["latent"], call.rows["rotary_key"]), strict=True):
            field[slots // block_size, slots % block_size, 0] = numbers
        given: dict[str, Any] = {"read": latents_reader(fields), "heads": call.heads, "rule": call.rule}
        return partial(latent_decode, **given), partial(latent_prefill, block_size=block_size, **given)

    return keep


def require_plain(rule: AttentionRule, sinks: torch.Tensor | None) -> None:
    """Raise ConfigError unless latents are attended to without windows, soft caps and sinks."""
    if rule.sliding_window or rule.soft_cap or sinks is not None:
        raise ConfigError("latent attention with a window, a soft cap or sinks is not supported")
