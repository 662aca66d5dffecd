"""Model: transformers' own modules over our paged cache.

Every decoder family of transformers that declares `_supports_attention_backend` calls
its attention by a name in its configuration. We register one function under one name;
the batch travels as an argument through `model(...)` down to that function, which writes
K and V to the paged cache and calls `engine/attention.py`. So one adapter serves a
hundred families, and no model is written here.

Declaring the backend is not enough: some hybrids declare it and call it for part of
their layers, others drop the argument on the way. None of them raises. Therefore a
model has to prove itself at start: `engine/self_check.py`.

No mask function is registered, and that is on purpose: transformers then builds no mask,
and one row of tokens may hold many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from base.errors import ConfigError
from engine.attention import paged_decode_attention, paged_prefill_attention, write_kv
from engine.attention_rule import AttentionRule
from engine.batch import Batch
from engine.paged_cache import PagedCache
from engine.pipeline import Stage, cut_to_stage

ATTENTION_NAME = "conductor_paged"
"""What our attention function is called in a model's configuration."""


class AttentionCall(Protocol):
    """What a layer's attention is handed to. Travels through the model as an argument."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_dim] for tensors [num_tokens, heads, dim]."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's attention layers keep for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    """The larger of K's and V's."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one step over the paged cache."""

    batch: Batch
    cache: PagedCache

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, kv_cache = self.batch, self.cache.layer(layer)
        write_kv(key, value, kv_cache, batch.slots)
        output = torch.empty_like(query)
        middle = batch.num_single
        if middle:
            rows = batch.singles
            output[:middle] = paged_decode_attention(
                query[:middle], kv_cache, rows.block_tables, rows.context_lens, rule, sinks
            )
        if middle < len(query):
            rows = batch.chunks
            output[middle:] = paged_prefill_attention(
                query[middle:],
                kv_cache,
                rows.block_tables,
                batch.query_starts,
                rows.context_lens,
                rule,
                sinks,
            )
        return output[..., : value.shape[-1]]


class PagedModel:
    """Owns a causal language model and runs batches through it. Belongs to the device thread.

    Attributes:
        module: The model itself.
        family: transformers' name of the architecture.
        shape: What its attention layers keep; found by running two tokens.
        max_model_len: Positions it was made for.

    Raises:
        ConfigError: the family cannot be served; the message names it and what is missing.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.family: str = model.config.model_type
        _require_backend(model, self.family)
        self.module = model.eval()
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self._hidden_size: int = text_config.hidden_size
        self._stage: Stage | None = None
        self.max_model_len: int = text_config.max_position_embeddings
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        AttentionInterface.register(ATTENTION_NAME, _attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self.shape = self._find_shape()

    def keep_stage(self, stage: Stage, layers: range) -> None:
        """Keep these layers, and from here on compute batches together with the other stages.

        Raises:
            ConfigError: the family cannot be cut so.
        """
        cut_to_stage(self.module, layers)
        self.shape = replace(self.shape, num_layers=len(layers))
        self._stage = stage

    @property
    def has_logits(self) -> bool:
        """Whether `forward` returns any: the last stage's does."""
        return self._stage is None or self._stage.is_last

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Compute a batch, write its KV, and return the wanted logits [num_sampling, vocab_size].

        Of a pipeline, every stage calls this, in the same order of batches.
        """
        return self._run(batch.token_ids, batch.position_ids, batch.logit_rows, PagedAttention(batch, cache))

    @torch.inference_mode()
    def eager_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logits [num_tokens, vocab_size] that the family computes by itself."""
        self.module.set_attn_implementation("eager")
        try:
            input_ids = torch.tensor([token_ids], device=self.device)
            logits: torch.Tensor = self.module(input_ids=input_ids, use_cache=False).logits[0]
        finally:
            self.module.set_attn_implementation(ATTENTION_NAME)
        return logits

    def _run(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor, paged: AttentionCall
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {"position_ids": position_ids, "use_cache": False, "paged": paged}
        hidden = None
        if self._stage is not None:
            hidden = self._stage.taken_in((*token_ids.shape, self._hidden_size), self.dtype)
        arguments |= {"input_ids": token_ids} if hidden is None else {"inputs_embeds": hidden}
        if self._stage is not None and not self._stage.is_last:
            handed_on: torch.Tensor = self.module.base_model(**arguments).last_hidden_state
            self._stage.hand_on(handed_on)
            return handed_on[0, :0]
        logits: torch.Tensor = self.module(**arguments, logits_to_keep=rows).logits[0]
        return logits

    @torch.inference_mode()
    def _find_shape(self) -> AttentionShape:
        probe = _ShapeProbe()
        token_ids = torch.tensor([[0, 1]], device=self.device)
        rows = torch.tensor([1], device=self.device)
        try:
            self._run(token_ids, token_ids, rows, probe)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"model family {self.family!r} cannot be served: it does not hand the batch "
                f"on to its attention ({type(error).__name__}: {error})"
            ) from error
        return probe.shape(self.family)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' layers call. query, key, value: [1, heads, num_tokens, dim].

    The names of the arguments are transformers'; a family leaves out what it does not have.
    """
    paged: AttentionCall = arguments["paged"]
    rule = AttentionRule(
        scale=arguments.get("scaling") or query.shape[-1] ** -0.5,
        sliding_window=arguments.get("sliding_window") or 0,
        soft_cap=arguments.get("softcap") or 0.0,
    )
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    layer: Any = module.layer_idx
    return paged.attend(layer, query, key, value, rule, arguments.get("s_aux"))[None], None


def _require_backend(model: PreTrainedModel, family: str) -> None:
    if not model._supports_attention_backend:
        raise ConfigError(
            f"model family {family!r} cannot be served: transformers' modules for it do not call "
            "their attention through AttentionInterface (_supports_attention_backend)"
        )
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise ConfigError(f"model family {family!r} cannot be served: attention in chunks is not supported")


class _ShapeProbe:
    """Stands in for the paged cache once, to see what each layer brings."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self._seen[layer] = (key.shape[1], max(key.shape[2], value.shape[2]))
        return torch.zeros(
            (len(query), query.shape[1], value.shape[2]), dtype=query.dtype, device=query.device
        )

    def shape(self, family: str) -> AttentionShape:
        layers = sorted(self._seen)
        heads = {num_heads for num_heads, _ in self._seen.values()}
        if not layers or layers != list(range(len(layers))) or len(heads) != 1:
            raise ConfigError(
                f"model family {family!r} cannot be served: not every layer is attention with the "
                f"same number of KV heads (layers {layers}, KV heads {sorted(heads)})"
            )
        return AttentionShape(len(layers), heads.pop(), max(dim for _, dim in self._seen.values()))
