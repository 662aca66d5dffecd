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
from engine.kernels.expanded_latents import Chunks, attend_expanded, capacity_of
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_latents import decode_latents, prefill_latents
from engine.kernels.paged_prefill import paged_prefill
from engine.kernels.write_kv import write_kv, write_rows
from engine.latent_attention import LatentHeads, absorbed_query, heads_of, require_plain, values_of
from engine.long_chunks import (
    MAX_LONG_CHUNKS,
    LongChunk,
    attend_long,
    can_attend,
    seen_heads,
    seen_latents,
)
from engine.opaque import opaque
from engine.paged_cache import PagedCache
from engine.scaled_kv import SCALE_WIDTH
from engine.step_memory import StepShape, StepViews, carve

GPU_ATTENTION_NAME = "conductor_paged_gpu"
"""Name of this attention function in a model's configuration."""

HEADER_NUMBERS = 5 + 3 * MAX_LONG_CHUNKS
"""Numbers in a step's header: its shape, the first row of its chunks, and the three of each long chunk."""


class StepPart(Enum):
    """The part of a step that a layer is called for."""

    ALL = "all tokens, their K and V written first"
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
    """A row for each window of the model: `decode_parts` of the sequences of one token; where there are none,
    any numbers."""
    windows: tuple[int, ...]
    """Last tokens that some layers read, as in `parts`; 0: all."""
    rows: torch.Tensor
    """[num_rows] int64 on the device; the last token of each sequence."""


def step_header(
    shape: StepShape, chunks: Sequence[LongChunk] = (), num_single: int | None = None
) -> torch.Tensor:
    """Return a step's shape, and its chunks if all of them are long; a graph serves those of any lengths.

    Args:
        num_single: Sequences of one token that the step has, behind which its chunks begin; None: as many as
            its shape.
    """
    header = torch.zeros(HEADER_NUMBERS, dtype=torch.int64)
    header[:4] = torch.tensor([shape.num_tokens, shape.num_single, shape.num_chunks, shape.max_blocks])
    header[4] = shape.num_single if num_single is None else num_single
    if chunks:
        header[5 : 5 + 3 * len(chunks)] = torch.tensor(chunks).flatten()
    return header


def chunks_of(header: torch.Tensor) -> int:
    """Return the number of chunks of a step, of its header."""
    return int(header[2])


def attach_cache(model: nn.Module, cache: PagedCache) -> None:
    """Give every attention module of `model` its layer of the fields of `cache`.

    A tensor of the module and not an index: the compiler would make one copy of the layer for each index."""
    AttentionInterface.register(GPU_ATTENTION_NAME, _attention)
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            module.register_buffer("kv_layer", layer_of(cache, layer), persistent=False)
            module.kv_block_size = cache.layout.block_size if cache.has("scale") else 0  # type: ignore


def layer_of(cache: PagedCache, layer: int) -> torch.Tensor:
    """Return a layer of the cache as attention modules have it: one tensor, whatever fields it has.

    The compiler knows of no two inputs that share memory and are written to. K and V that are computed as
    they are cached are [num_blocks, 2, block_size, heads, head_dim]; all else is [num_blocks, numbers], of
    latents in their dtype, of 8 bits in bytes, and is taken apart inside of operators."""
    if cache.has("latent"):
        dtype = cache.field("latent").dtype
        return cache.tensor.view(len(cache.tensor), cache.layout.num_layers, -1)[:, layer].view(dtype)
    if cache.has("scale"):
        return cache.tensor.view(len(cache.tensor), cache.layout.num_layers, -1)[:, layer]
    return cache.heads()[:, layer]


def scaled_parts(layer: torch.Tensor, block_size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return K and V of a layer, [num_blocks, 2, block_size, heads, dim], and their scales, if it has any.

    Args:
        block_size: 0: K and V are as they are computed.
    """
    if not block_size:
        return layer, None
    num_blocks, num_bytes = layer.shape
    heads = num_bytes // (2 * block_size * dim + 4 * SCALE_WIDTH)
    numbers = 2 * block_size * heads * dim
    kv = layer[:, :numbers].view(torch.float8_e4m3fn).view(num_blocks, 2, block_size, heads, dim)
    return kv, layer[:, numbers:].view(torch.float32).view(num_blocks, heads, SCALE_WIDTH)


def latent_parts(layer: torch.Tensor, rank: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents and rotary keys of a layer, each [num_blocks, block_size, 1, width]."""
    num_blocks, numbers = layer.shape
    block_size = numbers // (rank + rotary)
    latents, rotary_keys = layer[:, : block_size * rank], layer[:, block_size * rank :]
    return latents.view(num_blocks, block_size, 1, rank), rotary_keys.view(num_blocks, block_size, 1, rotary)


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
    if (heads := heads_of(module)) is not None:
        return _latent_attention(module, heads, query, key, call, arguments)[None], None
    kv_layer: torch.Tensor = module.kv_layer  # type: ignore[assignment]
    block_size: int = module.kv_block_size  # type: ignore[assignment]
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    value_dim = value.shape[-1]
    cache_dim = max(query.shape[-1], value_dim) if block_size else kv_layer.shape[-1]
    rows = [_token_rows(item, cache_dim) for item in (query, key, value)]
    where = (kv_layer, block_size, call.memory, call.header)
    window = arguments.get("sliding_window") or 0
    rule = (scale, window, arguments.get("softcap") or 0.0)
    sinks = arguments.get("s_aux")
    if call.part is StepPart.KEEP_KV:
        keep_kv(rows[1], rows[2], *where)
        output = torch.zeros_like(rows[0])
    elif call.part is StepPart.LAST_ROWS:
        output = last_rows_attention(rows[0], *where, *rule, sinks)
    else:
        output = paged_attention(*rows, *where, call.parts, call.windows, *rule, sinks)
    return output[None, ..., :value_dim], None


def _latent_attention(
    module: nn.Module,
    heads: LatentHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    call: StepCall,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Attend by latents, as `_attention`; return [num_tokens, num_heads, value_dim]."""
    rule = AttentionRule(1.0, arguments.get("sliding_window") or 0, arguments.get("softcap") or 0.0)
    require_plain(rule, arguments.get("s_aux"))
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    rows, query = heads.take(key[0].transpose(0, 1)), query[0].transpose(0, 1)
    layer: torch.Tensor = module.kv_layer  # type: ignore[assignment]
    if call.part is not StepPart.LAST_ROWS:
        keep_latents(rows["latent"], rows["rotary_key"], layer, call.memory, call.header)
    if call.part is StepPart.KEEP_KV:
        return query.new_zeros((*query.shape[:2], heads.value_dim))
    all_rows = call.part is not StepPart.LAST_ROWS
    output: torch.Tensor = latent_attention(
        query, heads.weight, layer, call.memory, call.header, call.parts, scale, heads.nope_dim, all_rows
    )
    return output


def _like_query(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _nothing(*_: object) -> None:
    """Return what an operator without a result does."""


def _token_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [num_tokens, heads, dim] of [1, heads, num_tokens, <= dim]; zeros add nothing to a score."""
    missing = dim - rows.shape[-1]
    return (pad(rows, (0, missing)) if missing else rows)[0].transpose(0, 1)


@opaque(_like_query, changes=("kv_layer",))
def paged_attention(  # noqa: PLR0913 an operator's arguments are tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    block_size: int,
    memory: torch.Tensor,
    header: torch.Tensor,
    parts: torch.Tensor,
    windows: Sequence[int],
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write K and V, attend; [num_tokens, heads, head_dim] in and out.

    `windows` are those of the rows of `parts`. They are looked through here: torch's compiler, which traces
    what calls this, finds that 0 is not in (0,)."""
    shape, views, first_row, chunks = _read(memory, header)
    kv_layer, scales = scaled_parts(kv_layer, block_size, query.shape[2])
    has_chunks = shape.num_chunks > 0
    rule = AttentionRule(scale, sliding_window, soft_cap)
    # Without chunks, the decode kernel writes K and V.
    if has_chunks:
        write_kv(key, value, kv_layer, views.slots, scales)
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
            # a layer whose window is not the model's cuts contexts for itself
            parts=parts[windows.index(sliding_window)] if sliding_window in windows else None,
            scales=scales,
            groups=views.single_groups if not sliding_window and 0 in windows else None,
        )
    if not has_chunks:
        return output
    # Rows of padding behind the singles were written above; the chunks overwrite them.
    is_plain = not (sliding_window or soft_cap or sinks is not None)
    if chunks and is_plain and can_attend(query, value.shape[2]):
        rows = slice(first_row, None)
        seen = seen_heads((key[rows], value[rows]), kv_layer, views.chunk_lens, scales)
        attended = attend_long(query[rows], seen, views.chunk_tables, chunks, scale)
        if not first_row:
            return attended
        output[rows] = attended
        return output
    tables, starts, lens = views.chunk_tables, views.chunk_starts, views.chunk_lens
    paged_prefill(query, kv_layer, tables, starts, lens, rule, sinks, output=output, scales=scales)
    return output


@opaque(_like_query)
def last_rows_attention(  # noqa: PLR0913 as above
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_size: int,
    memory: torch.Tensor,
    header: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for the last token of each sequence, [num_rows, heads, head_dim] in and out; KV is written."""
    _, views, _, _ = _read(memory, header)
    tables = torch.cat([views.single_tables, views.chunk_tables])
    lens = torch.cat([views.single_lens, views.chunk_lens])
    rule = AttentionRule(scale, sliding_window, soft_cap)
    kv_layer, scales = scaled_parts(kv_layer, block_size, query.shape[2])
    return paged_decode(query, kv_layer, tables, lens, rule, sinks, scales=scales)


@opaque(_nothing, changes=("kv_layer",))
def keep_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    block_size: int,
    memory: torch.Tensor,
    header: torch.Tensor,
) -> None:
    """Write K and V of all tokens, each [num_tokens, heads, head_dim]."""
    _, views, _, _ = _read(memory, header)
    kv_layer, scales = scaled_parts(kv_layer, block_size, key.shape[2])
    write_kv(key, value, kv_layer, views.slots, scales)


@opaque(_nothing, changes=("kv_layer",))
def keep_latents(
    latent: torch.Tensor,
    rotary_key: torch.Tensor,
    kv_layer: torch.Tensor,
    memory: torch.Tensor,
    header: torch.Tensor,
) -> None:
    """Write latents and rotary keys of all tokens, each [num_tokens, width]."""
    _, views, _, _ = _read(memory, header)
    latents, rotary_keys = latent_parts(kv_layer, latent.shape[1], rotary_key.shape[1])
    write_rows(latent, latents, views.slots)
    write_rows(rotary_key, rotary_keys, views.slots)


def _like_values(query: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    nope_dim: int = arguments[5]
    return query.new_empty((*query.shape[:2], weight.shape[1] - nope_dim))


@opaque(_like_values)
def latent_attention(  # noqa: PLR0913 an operator's arguments are tensors and numbers
    query: torch.Tensor,
    weight: torch.Tensor,
    kv_layer: torch.Tensor,
    memory: torch.Tensor,
    header: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
    nope_dim: int,
    all_rows: bool,
) -> torch.Tensor:
    """Attend by latents that are written; `all_rows` are the step's tokens, others each sequence's last.

    `weight` is as `engine/latent_attention.py` takes it, the result [num_rows, num_heads, value_dim]."""
    shape, views, first_row, chunks = _read(memory, header)
    layer = latent_parts(kv_layer, weight.shape[2], query.shape[2] - nope_dim)
    if not all_rows:
        tables = torch.cat([views.single_tables, views.chunk_tables])
        lens = torch.cat([views.single_lens, views.chunk_lens])
        mixed = decode_latents(*absorbed_query(query, weight, nope_dim), layer, tables, lens, scale)
        return values_of(mixed, weight, nope_dim).contiguous()
    output = query.new_empty((*query.shape[:2], weight.shape[1] - nope_dim))
    is_long = bool(chunks) and can_attend(query, output.shape[2])
    short = Chunks(views.chunk_tables, views.chunk_starts, views.chunk_lens)
    capacity = capacity_of(shape.num_tokens, short.tables, layer[0].shape[1], weight)
    has_short = shape.num_chunks > 0 and not is_long
    absorbed = slice(0, shape.num_single if is_long else None)
    if not is_long or shape.num_single:
        rows_query = absorbed_query(query[absorbed], weight, nope_dim)
        mixed = torch.empty(rows_query[0].shape, dtype=query.dtype, device=query.device)
        singles = slice(0, shape.num_single)
        if shape.num_single:
            halves = rows_query[0][singles], rows_query[1][singles]
            lens, into = views.single_lens, mixed[singles]
            decode_latents(*halves, layer, views.single_tables, lens, scale, parts[0], output=into)
        if has_short:
            prefill_latents(*rows_query, layer, *short, scale, mixed, capacity=capacity)
        output[absorbed] = values_of(mixed, weight, nope_dim)
    if has_short and capacity:  # over what was absorbed of its tokens
        attend_expanded(query, layer, weight, nope_dim, short, capacity, scale, output)
    if is_long:  # over rows of padding behind the singles
        rows = slice(first_row, None)
        seen = seen_latents(layer, weight, nope_dim, views.chunk_lens)
        output[rows] = attend_long(query[rows], seen, views.chunk_tables, chunks, scale)
    return output


def _read(
    memory: torch.Tensor, header: torch.Tensor
) -> tuple[StepShape, StepViews[torch.Tensor], int, list[LongChunk]]:
    """Return a step's shape, what lies in its memory, the first row of its chunks, and the long ones."""
    num_tokens, num_single, num_chunks, max_blocks, first_row, *numbers = header.tolist()
    shape = StepShape(num_tokens, num_single, num_chunks, max_blocks)
    chunks = zip(numbers[::3], numbers[1::3], map(bool, numbers[2::3]), strict=True)
    return shape, carve(memory, shape), first_row, [LongChunk(*chunk) for chunk in chunks if chunk[0]]
