"""The model on a GPU: its projections fused, one layer compiled, its attention in kernels.

The modules are those of `engine/model.py`; nothing of a family is written here. Once a model is here its
weights have moved into fused products, and it runs in no other manner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.compiled import compile_around, compile_layers, compiled
from engine.expert_load import ExpertCounts
from engine.fused_projections import use_products
from engine.gpu_attention import GPU_ATTENTION_NAME, StepCall, StepPart, attach_cache
from engine.gpu_experts import use_experts
from engine.kernels.decode_parts import PartCounts, count_parts, decode_parts
from engine.kernels.paged_decode import decode_programs, most_members
from engine.kernels.paged_latents import DECODE_PROGRAMS, head_groups
from engine.kernels.step_inputs import step_inputs
from engine.last_layer import can_be_cut, dropping_result, of_wanted_rows
from engine.latent_attention import heads_of
from engine.layer_hooks import LayerHooks
from engine.long_chunks import make_plans
from engine.paged_cache import PagedCache
from engine.pipeline import Stage, run_stage
from engine.real_rotary import use_real_rotary
from engine.step_memory import StepShape, StepViews, carve

ODD_SIZE = 1009
"""Numbers of a tensor that stands for none. The compiler makes variants for an empty tensor, for a view, and
for a size that it finds elsewhere."""


class GpuModel:
    """Owns a causal language model on a GPU. Belongs to the device thread.

    Args:
        is_compiled: False: every module as it is, for comparison.
        stage: The stage that the model was cut to; None: it is whole.
        counts: Counts the choices of experts; None: there are none, or nobody asks.
        layer_groups: Number of groups that steps with long chunks report one by one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        is_compiled: bool = True,
        layer_groups: int = 1,
        stage: Stage | None = None,
        counts: ExpertCounts | None = None,
    ) -> None:
        self._model = model.eval()
        config = model.config.get_text_config()
        self._stage = stage
        is_last = stage is None or stage.is_last
        attach_cache(model, cache)
        self._heads = heads_read(model, cache, config.num_attention_heads)
        model.set_attn_implementation(GPU_ATTENTION_NAME)
        self._counts = counts
        self._counts_in_kernels = use_experts(model)
        use_real_rotary(model)
        layers = self._layers = _decoder_layers(model)
        self._cuts_last_layer = is_last and can_be_cut(model, layers)
        if self._cuts_last_layer:
            keep_kv = dropping_result(layers[-1].forward)
        if is_compiled:
            use_products(model)
            compile_layers(layers)
            compile_around(model.base_model)
        if self._cuts_last_layer:
            keep_kv = compiled(keep_kv) if is_compiled else keep_kv
            layers[-1].forward = of_wanted_rows(layers[-1].forward, keep_kv)
        self.hooks = LayerHooks(layers, layer_groups)
        self.device: torch.device = model.device
        self.row_states = torch.empty(0)
        """The last hidden state behind each row of logits of the step that was queued last."""
        self._states = torch.empty(0)
        self._windows = windows_of(config)
        odd = len(self._windows), ODD_SIZE
        self._no_parts = torch.zeros(odd, dtype=torch.int32, device=self.device)
        model.base_model.register_forward_hook(self._ended)

    @property
    def has_latents(self) -> bool:
        """Whether attention is over latents."""
        return self._heads.are_latent

    @property
    def most_members(self) -> int:
        """Sequences that share a prefix and are attended together, at most; 1: none are."""
        return self._heads.most_members

    def take_steps(self, max_tokens: int) -> None:
        """Make ready, before the first step, for steps of so many rows at most."""
        if self._counts is not None:
            cut = self._layers[-1] if self._cuts_last_layer else None
            self._counts.count_slots(max_tokens, self._counts_in_kernels, cut)

    @torch.no_grad()
    def make_plans(self, chunk_tokens: int, max_model_len: int) -> None:
        """Have cuDNN make this thread's plans; 40 ms each, which no request shall wait for."""
        heads = self._heads
        like = torch.empty((0, heads.queries, heads.widths[1]), dtype=self._model.dtype, device=self.device)
        make_plans(like, heads.widths, chunk_tokens, max_model_len)

    @torch.no_grad()
    def forward(
        self, memory: torch.Tensor, shape: StepShape, header: torch.Tensor, last_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Compute the step that lies in `memory`, write its KV, and return logits [num_rows, vocab_size].

        Every stage of a pipeline calls this, in the same order of steps; the last one's result are logits.

        Args:
            memory: [>= shape.size] int32 on the device, as `StepWriter` lays it out.
            last_tokens: [any] int64 on the device; what the last step sampled.
        """
        views = carve(memory, shape)
        if self._counts is not None:
            self._counts.begin(views.slots)
        token_ids, positions, rows = step_inputs(
            views.token_ids, views.sources, views.positions, views.logit_rows, last_tokens
        )
        arguments = {
            "position_ids": positions[None],
            "use_cache": False,
            "paged": StepCall(memory, header, StepPart.ALL, self._parts(views), self._windows, rows),
        }
        keep = 0 if self._cuts_last_layer else rows
        logits = run_stage(self._model, self._stage, token_ids[None], arguments, keep)
        self.row_states = self._states if self._cuts_last_layer else self._states[rows]
        return logits

    def _ended(self, _: nn.Module, __: Any, output: Any) -> None:
        self._states = output[0][0]

    def _parts(self, views: StepViews[torch.Tensor]) -> torch.Tensor:
        """Return who reads what of the sequences of one token, which all layers share."""
        if not len(views.single_lens):
            return self._no_parts
        groups = views.single_groups if self._heads.most_members > 1 else None
        return decode_parts(views.single_lens, self._heads.parts, self._windows, groups)


def windows_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the windows of a model whose layers share the parts of a step; 0: none."""
    window = getattr(config, "sliding_window", None)
    return (0, window) if window else (0,)


class HeadsRead(NamedTuple):
    """The heads of one rank, as attention goes about them."""

    queries: int
    parts: PartCounts
    """Numbers of parts into which the contexts of a step's sequences are cut."""
    widths: tuple[int, int, int]
    """Heads, and numbers of K and of V in each, as long chunks are attended to."""
    are_latent: bool = False
    most_members: int = 1
    """Sequences that share a prefix and are attended together."""


def heads_read(model: PreTrainedModel, cache: PagedCache, num_heads: int) -> HeadsRead:
    """Return how a rank reads its cache; the whole model has `num_heads` query heads."""
    layout = cache.layout
    for module in model.modules():
        if (latents := heads_of(module)) is not None:
            rotary = cache.field("rotary_key").shape[-1]
            widths = layout.num_heads, latents.nope_dim + rotary, latents.value_dim
            parts = count_parts(head_groups(layout.num_heads), DECODE_PROGRAMS, cache.tensor.device)
            return HeadsRead(layout.num_heads, parts, widths, are_latent=True)
    width = layout.fields[0].width
    config = model.config.get_text_config()
    num_ranks = max(1, (getattr(config, "num_key_value_heads", None) or num_heads) // layout.num_heads)
    widths = layout.num_heads, width, width
    programs = decode_programs(width * model.dtype.itemsize, cache.has("scale"))
    parts = count_parts(layout.num_heads, programs, cache.tensor.device)
    members = most_members(num_heads // num_ranks, layout.num_heads) if parts.all > 1 else 1
    return HeadsRead(num_heads // num_ranks, parts, widths, most_members=members)


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of modules that is as long as the model is deep."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return nn.ModuleList()
