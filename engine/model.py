"""Model: transformers' own modules over our paged cache.

Every decoder family of transformers that declares `_supports_attention_backend` calls its attention by a name
in its configuration. We register one function under one name; the batch travels as an argument through
`model(...)` down to that function, which writes K and V to the paged cache and calls `engine/attention.py`.
So one adapter serves a hundred families, and no model is written here.

Declaring the backend is not enough: some hybrids declare it and call it for part of their layers, others drop
the argument. None of them raises. Therefore a model has to prove itself at start: `engine/self_check.py`.

No mask function is registered: transformers then builds no mask, and one row may hold many sequences. A model
first runs so, and once with masks, which show whether those of a layer and its attention have one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from base.errors import ConfigError
from base.kv_layout import KvField, KvLayout
from engine.attention import (
    AttentionRule,
    decode_groups,
    heads_reader,
    paged_decode_attention,
    paged_prefill_attention,
    write_kv,
)
from engine.batch import Batch
from engine.latent_attention import Keep, LayerCall, Rows, heads_of, kept_latents, show_latents
from engine.paged_cache import PagedCache
from engine.pipeline import Stage, cut_to_stage, layers_of, run_stage
from engine.pooling import HiddenStates
from engine.quantized_weight import FLOATS

ATTENTION_NAME = "conductor_paged"
"""Name of our attention function in a model's configuration."""

FIRST_NAME = "conductor_first_run"
"""Name of it while a model first runs: layers get masks, which say by which window the family hides keys."""

OWN_MASKS = "its layers make attention masks of their own, which is not supported"

MIN_BLOCK_SIZE = 16

Attend = Callable[[torch.Tensor, LayerCall], torch.Tensor]
"""The attention of one step, which travels through the model as an argument; takes a layer's query first,
[num_tokens, heads, dim]."""


def paged_attention(batch: Batch, cache: PagedCache) -> Attend:
    """Return the attention of one step over the paged cache."""
    middle, views = batch.shape.num_single, batch.views
    layout = cache.layout
    token_bytes = layout.layer_bytes // layout.block_size
    groups = decode_groups(views.single_tables, views.single_lens, layout.block_size, token_bytes)
    chunks = views.chunk_tables, views.chunk_starts - middle, views.chunk_lens
    kept = (kept_latents if cache.has("latent") else kept_heads)(cache, views.slots.long())

    def attend(query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        decode, prefill = kept(call)
        found = []
        if middle:
            found.append(decode(query[:middle], groups))
        if middle < len(query):
            found.append(prefill(query[middle:], *chunks))
        both = torch.cat(found) if len(found) > 1 else found[0]
        return both if call.heads else both[..., : call.rows["value"].shape[-1]]

    return attend


def kept_heads(cache: PagedCache, slots: torch.Tensor) -> Keep:
    """Return what writes a step's K and V into these slots, [num_tokens] int64, layer by layer."""
    layers = cache.heads().unbind(1)
    scales_of_layers = cache.field("scale")[:, :, 0].unbind(1) if cache.has("scale") else None

    def keep(call: LayerCall) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        kv_cache, key = layers[call.layer], call.rows["key"]
        scales = None if scales_of_layers is None else scales_of_layers[call.layer]
        write_kv(key, call.rows["value"], kv_cache, slots, scales)
        read = heads_reader(kv_cache, scales, key.dtype)
        given: dict[str, Any] = {"read": read, "rule": call.rule, "sinks": call.sinks}
        block_size = cache.layout.block_size
        return (
            partial(paged_decode_attention, **given),
            partial(paged_prefill_attention, block_size=block_size, **given),
        )

    return keep


class PagedModel:
    """Owns a causal language model and runs batches through it. Belongs to the device thread.

    Attributes:
        family: transformers' name of the architecture.
        shape: Layout of its KV in blocks of the smallest size; found by running two tokens.
        max_model_len: Number of positions it was made for.
        quantization: What the node says of its weights.
        hidden: The last hidden states of a step.

    Raises ConfigError if the family cannot be served; the message names it and what is missing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family: str = model.config.model_type
        _require_backend(model, self.family)
        self.module = model.eval()
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self._stage: Stage | None = None
        self.max_model_len = num_positions(text_config)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.quantization = FLOATS
        self.hidden = HiddenStates(model.base_model)
        show_latents(model)
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionInterface.register(FIRST_NAME, _first_attention)
        AttentionMaskInterface.register(FIRST_NAME, _window_mask)
        self.shape = self._find_shape()
        model.set_attn_implementation(ATTENTION_NAME)

    def keep_stage(self, stage: Stage, layers: range) -> None:
        """Keep these layers, and from here on compute batches together with the other stages.

        Raises ConfigError if the family cannot be cut so."""
        if len(layers_of(self.module)) != self.shape.num_layers:
            raise ConfigError(
                f"pipeline parallel: model family {self.family!r} attends {self.shape.num_layers} times in "
                f"{len(layers_of(self.module))} layers, which cannot be cut"
            )
        cut_to_stage(self.module, layers)
        self.shape = replace(self.shape, num_layers=len(layers))
        self._stage = stage

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Compute a batch, write its KV, and return the wanted logits [num_sampling, vocab_size].

        Every stage of a pipeline calls this, in the same order of batches; only the last has logits.
        """
        token_ids, positions = (row.long()[None] for row in (batch.views.token_ids, batch.views.positions))
        return self._run(token_ids, positions, batch.logit_rows, paged_attention(batch, cache))

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
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor, paged: Attend
    ) -> torch.Tensor:
        arguments = {"position_ids": position_ids, "use_cache": False, "paged": paged}
        return run_stage(self.module, self._stage, token_ids, arguments, rows)

    @torch.inference_mode()
    def _find_shape(self) -> KvLayout:
        """Run two tokens and see what each layer brings: without masks, as ever after, and with some."""
        first = _FirstRun(self.max_model_len)
        token_ids = torch.tensor([[0, 1]], device=self.device)
        try:
            with first_run():
                for name in (ATTENTION_NAME, FIRST_NAME):
                    self.module.set_attn_implementation(name)
                    self._run(token_ids, token_ids, token_ids[0, 1:], first)
            first.require_windows()
        except ConfigError as error:
            raise ConfigError(f"model family {self.family!r} cannot be served: {error}") from error
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"model family {self.family!r} cannot be served: it does not hand the batch "
                f"on to its attention ({type(error).__name__}: {error})"
            ) from error
        seen, layers = first.seen, sorted(first.seen)
        heads = {num_heads for num_heads, _ in seen.values()}
        names = {tuple(rows) for _, rows in seen.values()}
        if not layers or layers != list(range(len(layers))) or len(heads) != 1 or len(names) != 1:
            raise ConfigError(
                f"model family {self.family!r} cannot be served: not every layer is attention with the "
                f"same number of KV heads (layers {layers}, KV heads {sorted(heads)})"
            )
        fields = self._fields([rows for _, rows in seen.values()])
        return KvLayout(len(layers), heads.pop(), MIN_BLOCK_SIZE, fields)

    def _fields(self, layers: list[Rows]) -> tuple[KvField, ...]:
        """Return the fields that hold what each of the layers brings."""
        dtype = str(self.dtype).removeprefix("torch.")
        widths = {name: max(rows[name].shape[-1] for rows in layers) for name in layers[0]}
        if "key" in widths:
            # Kernels take K and V of one width; the rest of the smaller is padding that nobody reads.
            widths = dict.fromkeys(widths, max(widths.values()))
        return tuple(
            KvField(name, width, dtype, has_heads=layers[0][name].dim() == 3)
            for name, width in widths.items()
        )


class _FirstRun:
    """The attention of a model's first run, which attends to nothing and remembers what layers bring."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.seen: dict[int, tuple[int, Rows]] = {}
        """Number of KV heads, and what is kept of two tokens, by layer."""
        self.masks: dict[int, tuple[torch.Tensor | None, int]] = {}
        """Mask of `_window_mask`, and the window that attention is given, by layer."""

    def __call__(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        rows, heads = call.rows, call.heads
        self.seen[call.layer] = (query.shape[1] if heads else rows["key"].shape[1], rows)
        return query.new_zeros((*query.shape[:2], heads.value_dim if heads else rows["value"].shape[2]))

    def require_windows(self) -> None:
        """Raise ConfigError unless each layer's mask is that of the window which its attention knows.

        The self-check is shorter than most windows, and would not see the difference."""
        for mask, window in self.masks.values():
            wanted = 0 if mask is None else int(mask.max())
            if mask is not None and (mask.dtype != torch.int64 or int(mask.min()) != wanted):
                raise ConfigError(OWN_MASKS)
            if len({0 if size >= self._max_model_len else size for size in (wanted, window)}) > 1:
                raise ConfigError(
                    f"the mask of a layer has a window of {wanted} tokens, its attention {window}; 0: none"
                )


def _window_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    device: torch.device,
    local_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return a mask whose every number is the window that transformers would hide by, 0: none.

    These are whole numbers, which no mask has that a layer makes."""
    return torch.full((batch_size, 1, q_length, kv_length), local_size or 0, device=device)


def _first_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `_attention` in a first run, where masks are those of `_window_mask`."""
    layer: Any = module.layer_idx
    arguments["paged"].masks[layer] = attention_mask, arguments.get("sliding_window") or 0
    return _attention(module, query, key, value, None, **arguments)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for transformers' layers, which call this with tensors [1, heads, num_tokens, dim].

    The names of the arguments are transformers'; a family leaves out what it does not have.

    Raises ConfigError for a mask, which a layer has made itself: the self-check may not see what it hides.
    And for keys that are not one for each token, such as those of DeepSeek V4's layers that compress.
    """
    paged: Attend = arguments["paged"]
    if attention_mask is not None:
        raise ConfigError(OWN_MASKS)
    rule = AttentionRule(
        scale=arguments.get("scaling") or query.shape[-1] ** -0.5,
        sliding_window=arguments.get("sliding_window") or 0,
        soft_cap=arguments.get("softcap") or 0.0,
    )
    query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
    if len(key) != len(query):
        name = type(module).__name__
        raise ConfigError(f"{name} attends to other keys than those of its tokens, which is not supported")
    layer: Any = module.layer_idx
    heads = heads_of(module)
    rows = {"key": key, "value": value} if heads is None else heads.take(key)
    return paged(query, LayerCall(layer, rows, rule, arguments.get("s_aux"), heads))[None], None


@contextmanager
def first_run() -> Iterator[None]:
    """Raise ConfigError if the model that the body runs for the first time cannot be run.

    What config.json says of its parts does not fit together."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, ArithmeticError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"config.json describes a model that cannot be run: {reason}") from error


def num_positions(config: Any) -> int:
    """Return the positions that a model can be served with: those that it was made for, with one exception.

    Of `longrope` (Phi-3, Phi-4-mini) these are the ones before all keys of a sequence turn otherwise: KV that
    is kept of a chunk or a prefix would be of other angles than what comes after it.

    Raises ConfigError if the configuration has none."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"config.json: max_position_embeddings is {found!r}; a number of tokens is wanted")
    return min([found, *_angle_changes(config)])


def _angle_changes(config: Any) -> list[int]:
    """Return the positions from which rotary embeddings have other angles, for all of a sequence."""
    rules = getattr(config, "rope_parameters", None) or {}
    # Of some families there is one for each type of layer.
    of_types = [rule for rule in rules.values() if isinstance(rule, dict)]
    found = [
        rule.get("original_max_position_embeddings")
        for rule in (rules, *of_types)
        if rule.get("rope_type") == "longrope"
    ]
    return [position for position in found if isinstance(position, int)]


def _require_backend(model: PreTrainedModel, family: str) -> None:
    if not model._supports_attention_backend:
        raise ConfigError(
            f"model family {family!r} cannot be served: transformers' modules for it do not call "
            "their attention through AttentionInterface (_supports_attention_backend)"
        )
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise ConfigError(f"model family {family!r} cannot be served: attention in chunks is not supported")
