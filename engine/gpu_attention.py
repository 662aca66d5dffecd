"""Attention of one step on a GPU, as one operator that the compiler does not look into.

The operator writes the new tokens' K and V into the paged cache and attends. It is opaque because the
compiler, shown a write to the cache followed by a read, copies the whole cache around it.

Everything that differs between steps is in one buffer of fixed size (`step_memory.py`), and where in it is in
a small host tensor. So a compiled layer sees one dynamic number, that of tokens, and one CUDA graph serves
all steps of a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from engine.attention import AttentionRule
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.write_kv import write_kv
from engine.long_chunks import MAX_LONG_CHUNKS, LongChunk, attend_long, can_attend
from engine.step_memory import StepShape, StepViews, carve

GPU_ATTENTION_NAME = "conductor_paged_gpu"
"""Name of this attention function in a model's configuration."""

HEADER_NUMBERS = 4 + 2 * MAX_LONG_CHUNKS
"""Numbers in a step's header: its shape, and the tokens of each long chunk and of its prefix."""


class StepPart(Enum):
    """The part of a step that a layer is called for."""

    SINGLES = "one token of each sequence"
    CHUNKS = "chunks, and perhaps tokens of other sequences before them"
    KEEP_KV = "the K and V of all tokens alone; what attention returns is not used"
    LAST_ROWS = "the last token of each sequence, all K and V being in the cache"


class StepCall(NamedTuple):
    """The argument of a layer's attention, which travels through the model."""

    memory: torch.Tensor
    """[capacity] int32 on the device."""
    header: torch.Tensor
    """[HEADER_NUMBERS] int64 on the host, as `step_header` makes it."""
    part: StepPart
    parts: torch.Tensor
    """`decode_parts` of the sequences of one token; where there are none, any numbers."""
    rows: torch.Tensor
    """[num_rows] int64 on the device; the last token of each sequence."""


def step_header(shape: StepShape, chunks: Sequence[LongChunk] = ()) -> torch.Tensor:
    """Return a step's shape, and its chunks if all of them are long; a graph serves those of any lengths."""
    header = torch.zeros(HEADER_NUMBERS, dtype=torch.int64)
    header[:4] = torch.tensor([shape.num_tokens, shape.num_single, shape.num_chunks, shape.max_blocks])
    if chunks:
        header[4 : 4 + 2 * len(chunks)] = torch.tensor(chunks).flatten()
    return header


def attach_cache(model: nn.Module, cache: torch.Tensor) -> None:
    """Give every attention module of `model` its layer of `cache`.

    A tensor of the module and not an index: the compiler would make one copy of the layer for each index."""
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
    """Attend for transformers' layers, which call this with tensors [1, heads, num_tokens, dim].

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
        output = paged_attention(*rows, *where, call.parts, *rule, sinks)
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
    parts: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K and V, attend; [num_tokens, heads, head_dim] in and out."""
    shape, views, chunks = _read(memory, header)
    has_chunks = shape.num_chunks > 0
    rule = AttentionRule(scale, sliding_window, soft_cap)
    # Without chunks, the decode kernel writes K and V.
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
            parts=parts,
        )
    if not has_chunks:
        return output
    # Rows of padding among the singles were written above; the chunks overwrite them.
    is_plain = not (sliding_window or soft_cap or sinks is not None)
    if chunks and is_plain and can_attend(query):
        rows = slice(shape.num_single, None)
        own = (key[rows], value[rows])
        attended = attend_long(query[rows], own, kv_layer, views.chunk_tables, chunks, scale)
        if not shape.num_single:
            return attended
        output[rows] = attended
        return output
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
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, memory: torch.Tensor, header: torch.Tensor
) -> None:
    """Write K and V of all tokens, each [num_tokens, heads, head_dim]."""
    _, views, _ = _read(memory, header)
    write_kv(key, value, kv_layer, views.slots)


def _read(
    memory: torch.Tensor, header: torch.Tensor
) -> tuple[StepShape, StepViews[torch.Tensor], list[LongChunk]]:
    num_tokens, num_single, num_chunks, max_blocks, *numbers = header.tolist()
    shape = StepShape(num_tokens, num_single, num_chunks, max_blocks)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return shape, carve(memory, shape), [LongChunk(*pair) for pair in pairs if pair[0]]
