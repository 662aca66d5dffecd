"""Attention of one step on a GPU, as one operator that the compiler does not look into.

The operator writes the new tokens' K and V into the paged cache and attends. It is opaque
because the compiler, shown a write to the cache followed by a read, copies the whole
cache around it.

Everything that differs between steps is in one buffer of fixed size (`step_memory.py`),
and where in it is in a small host tensor. So a compiled layer sees one dynamic number,
that of tokens, and one CUDA graph serves all steps of a shape.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from engine.attention_rule import AttentionRule
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.write_kv import write_kv
from engine.step import StepPlan
from engine.step_memory import StepShape, StepViews, carve

GPU_ATTENTION_NAME = "conductor_paged_gpu"
"""What this attention function is called in a model's configuration."""

WHOLE_PROMPT_TOKENS = 2048
"""From this length on a prompt without prefix goes to cuDNN: 431 TFLOP/s at 4,096 tokens and 647 at
16,384, against 349 and 421 of the Triton kernel (32 heads of 128, H200, 2026-11-21)."""

WHOLE_PROMPT_STEP = 512
"""cuDNN's first call with a new length takes 41 ms, so prompts are rounded up to multiples of this."""

MAX_WHOLE_PROMPTS = 32
"""Prompts of one step that go to cuDNN at most; there is no gain in many small ones."""


class StepPart(Enum):
    """What of a step a layer is called for."""

    SINGLES = "one token of each sequence"
    CHUNKS = "chunks, and perhaps tokens of other sequences before them"
    KEEP_KV = "the K and V of all tokens alone; what attention returns is not used"
    LAST_ROWS = "the last token of each sequence, all K and V being in the cache"


class StepCall(NamedTuple):
    """What a layer's attention is handed; travels through the model as an argument."""

    memory: torch.Tensor
    """[capacity] int32 on the device."""
    header: torch.Tensor
    """[4 + MAX_WHOLE_PROMPTS] int64 on the host, as `step_header` makes it."""
    part: StepPart
    rows: torch.Tensor
    """[num_rows] int64 on the device; the last token of each sequence."""


def step_header(shape: StepShape, plan: StepPlan | None) -> torch.Tensor:
    """Return a step's shape, and the lengths of its prompts if all its chunks are long whole prompts.

    Args:
        plan: None where the step is captured: a graph serves chunks of any lengths.
    """
    header = torch.zeros(4 + MAX_WHOLE_PROMPTS, dtype=torch.int64)
    header[:4] = torch.tensor([shape.num_tokens, shape.num_single, shape.num_chunks, shape.max_blocks])
    if plan and is_whole_prompts(plan):
        chunks = plan.entries[plan.num_single :]
        header[4 : 4 + len(chunks)] = torch.tensor([entry.num_tokens for entry in chunks])
    return header


def is_whole_prompts(plan: StepPlan) -> bool:
    """Return whether all chunks of a step, one at least, are prompts that cuDNN is faster for."""
    chunks = plan.entries[plan.num_single :]
    long = all(entry.start == 0 and entry.num_tokens >= WHOLE_PROMPT_TOKENS for entry in chunks)
    return long and 0 < len(chunks) <= MAX_WHOLE_PROMPTS


def attach_cache(model: nn.Module, cache: torch.Tensor) -> None:
    """Give every attention module of `model` its layer of `cache`.

    A tensor of the module and not an index: the compiler would make one copy of the layer
    for each index.
    """
    AttentionInterface.register(GPU_ATTENTION_NAME, _attention)
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            module.register_buffer("kv_layer", cache[:, layer], persistent=False)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' layers call. query, key, value: [1, heads, num_tokens, dim].

    The names of the arguments are transformers'; a family leaves out what it does not have.
    """
    call: StepCall = arguments["paged"]
    kv_layer: torch.Tensor = module.kv_layer  # type: ignore[assignment]
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    value_dim, cache_dim = value.shape[-1], kv_layer.shape[-1]
    rows = [_token_rows(item, cache_dim) for item in (query, key, value)]
    where = (kv_layer, call.memory, call.header)
    rule = (scale, arguments.get("sliding_window") or 0, arguments.get("softcap") or 0.0)
    sinks = arguments.get("s_aux")
    if call.part is StepPart.KEEP_KV:
        keep_kv(rows[1], rows[2], *where)
        output = torch.zeros_like(rows[0])
    elif call.part is StepPart.LAST_ROWS:
        output = last_rows_attention(rows[0], *where, *rule, sinks)
    else:
        output = paged_attention(*rows, *where, *rule, sinks)
    return output[None, ..., :value_dim], None


def _token_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [num_tokens, heads, dim] of [1, heads, num_tokens, <= dim]; zeros add nothing to a score."""
    missing = dim - rows.shape[-1]
    return (pad(rows, (0, missing)) if missing else rows)[0].transpose(0, 1)


@torch.library.custom_op("conductor::paged_attention", mutates_args=("kv_layer",))
def paged_attention(  # noqa: PLR0913 an operator's arguments are tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    memory: torch.Tensor,
    header: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K and V, attend; [num_tokens, heads, head_dim] in and out."""
    shape, views, whole_lens = _read(memory, header)
    has_chunks = shape.num_chunks > 0
    rule = AttentionRule(scale, sliding_window, soft_cap)
    # singles that are decoded with no chunk beside them are written by the decode kernel
    if has_chunks:
        write_kv(key, value, kv_layer, views.slots)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if shape.num_single:
        singles = slice(0, shape.num_single)
        paged_decode(
            query[singles],
            kv_layer,
            views.single_tables,
            views.single_lens,
            rule,
            sinks,
            output=output[singles],
            added=None if has_chunks else (key[singles], value[singles]),
        )
    if not has_chunks:
        return output
    # Rows of padding among the singles were written above; the chunks overwrite them.
    if whole_lens and not (sliding_window or soft_cap or sinks is not None):
        return _whole_prompts(query, key, value, output, shape.num_single, whole_lens, scale)
    tables, starts, lens = views.chunk_tables, views.chunk_starts, views.chunk_lens
    paged_prefill(query, kv_layer, tables, starts, lens, rule, sinks, output=output)
    return output


@torch.library.custom_op("conductor::last_rows_attention", mutates_args=())
def last_rows_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    memory: torch.Tensor,
    header: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for the last token of each sequence, [num_rows, heads, head_dim] in and out; KV is written."""
    _, views, _ = _read(memory, header)
    tables = torch.cat([views.single_tables, views.chunk_tables])
    lens = torch.cat([views.single_lens, views.chunk_lens])
    rule = AttentionRule(scale, sliding_window, soft_cap)
    return paged_decode(query, kv_layer, tables, lens, rule, sinks)


@paged_attention.register_fake
@last_rows_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@torch.library.custom_op("conductor::keep_kv", mutates_args=("kv_layer",))
def keep_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    memory: torch.Tensor,
    header: torch.Tensor,
) -> None:
    """Write K and V of all tokens, each [num_tokens, heads, head_dim]."""
    _, views, _ = _read(memory, header)
    write_kv(key, value, kv_layer, views.slots)


def _read(memory: torch.Tensor, header: torch.Tensor) -> tuple[StepShape, StepViews[torch.Tensor], list[int]]:
    num_tokens, num_single, num_chunks, max_blocks, *lens = header.tolist()
    shape = StepShape(num_tokens, num_single, num_chunks, max_blocks)
    return shape, carve(memory, shape), [length for length in lens if length]


def _whole_prompts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    start: int,
    lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Return `output` with the causal attention of prompts without prefix, from token `start` on.

    A prompt is rounded up into the tokens that follow it: causality keeps them out of its
    own rows, and their rows are dropped. One prompt alone is returned without a copy.
    """
    for length in lens:
        rounded = min(-(-length // WHOLE_PROMPT_STEP) * WHOLE_PROMPT_STEP, query.shape[0] - start)
        rows = slice(start, start + rounded)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                key[rows].transpose(0, 1)[None],
                value[rows].transpose(0, 1)[None],
                is_causal=True,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        attended = attended[0].transpose(0, 1)  # [rounded, heads, head_dim]
        if rounded == query.shape[0] and attended.is_contiguous():
            return attended
        output[start : start + length] = attended[:length]
        start += length
    return output
