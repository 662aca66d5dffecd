"""Attention of long chunks by cuDNN, which is faster than the paged kernel, in parts that suit it.

cuDNN takes contiguous K and V, no paged ones, and its causal mask begins at the first key. So a chunk is cut
into segments, and each attends in parts that are merged by their lse (`kernels/merge_part.py`):

    keys     0 ....................... before | before + num_rows
             rectangles, seen by every row    | triangle, the segment's own

Rectangles are what it is fastest at: 690 TFLOP/s, against 530 to 650 of a triangle and 421 of the paged
kernel (32 heads of 128, one H200, 2026-11-21). Keys of a cached prefix are gathered out of their blocks
first, at the memory's speed.

The first call of a thread with new lengths or strides takes cuDNN 40 ms, in which it makes a plan. So there
are few lengths, and all are contiguous: rectangles of `RECTANGLE_ROWS` rows and of as many keys as a power of
two, triangles of multiples of `TRIANGLE_STEP`; fewer keys than `KEYS_STEP` go to the triangle, behind queries
that nobody reads. `make_plans` goes through all of them before the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from engine.kernels.merge_part import merge_part
from engine.kernels.read_scaled import read_scaled
from engine.latent_attention import expanded
from engine.step import StepEntry, StepPlan

MIN_TOKENS = 2048
"""Length from which a chunk comes here; with a prefix of `MIN_PREFIX`, half of it is enough."""
MIN_PREFIX = 4096
MAX_LONG_CHUNKS = 32
"""Number of long chunks in one step; there is no gain in many small ones."""

STEP_TOKENS = 512
"""Steps that are not captured are padded to a multiple of this: it bounds how many lengths cuDNN sees."""

SEGMENT = 16_384
"""Rows of a triangle at most. Cut in two, 16,384 take 6 ms more of 478 ms of prefill, 32,768 no more."""
TRIANGLE_STEP = 512
RECTANGLE_ROWS = (1024, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
KEYS_STEP = 2048
MAX_HEAD_DIM = 128
LATENT_WIDTHS = (192, 128)
"""Widths of K and V that DeepSeek's latents are expanded to."""


class LongChunk(NamedTuple):
    """A chunk that is attended here."""

    num_tokens: int
    prefix: int
    """Number of tokens before the chunk."""
    is_padded: bool = False
    """Whether rows at its end may be padding; it is alone in its step then, and has no prefix."""


Seen = Callable[[slice, torch.Tensor, LongChunk], tuple[torch.Tensor, torch.Tensor]]
"""Gives K and V, each [>= tokens, heads, width], of a whole sequence.

Takes the chunk's rows, counted from the step's first, its block table, and the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkSegment:
    """Consecutive rows of a chunk."""

    row: int
    """The first row, counted from the step's first."""
    num_rows: int
    before: int
    """Number of tokens of the sequence before these rows."""


def padded_tokens(num_tokens: int) -> int:
    """Return the number of tokens that a step which is not captured is padded to."""
    return -(-num_tokens // STEP_TOKENS) * STEP_TOKENS


def long_chunks(plan: StepPlan) -> list[LongChunk]:
    """Return a step's chunks if all of them, one at least, come here; otherwise none."""
    entries = plan.entries[plan.num_single :]
    if not entries or len(entries) > MAX_LONG_CHUNKS or not all(map(_is_long, entries)):
        return []
    return [LongChunk(entry.num_tokens, entry.start) for entry in entries]


def _is_long(entry: StepEntry) -> bool:
    return entry.num_tokens >= (MIN_TOKENS // 2 if entry.start >= MIN_PREFIX else MIN_TOKENS)


def can_attend(query: torch.Tensor, value_dim: int) -> bool:
    """Return whether cuDNN takes such heads. On a CPU the definition takes any."""
    is_short = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.shape[2], value_dim
    is_known = widths == LATENT_WIDTHS or (max(widths) <= MAX_HEAD_DIM and not any(dim % 8 for dim in widths))
    return not query.is_cuda or (is_short and is_known)


def segments_of(chunk: LongChunk, row: int, most: int) -> list[ChunkSegment]:
    """Cut a chunk that begins at `row` into segments of at most `most` rows."""
    return [
        ChunkSegment(row + at, min(most, chunk.num_tokens - at), chunk.prefix + at)
        for at in range(0, chunk.num_tokens, most)
    ]


def rectangles_of(num_keys: int) -> list[range]:
    """Cut so many leading keys, a multiple of `KEYS_STEP`, into ranges as long as powers of two."""
    found = []
    start = 0
    while start < num_keys:
        length = 1 << (num_keys - start).bit_length() - 1
        found.append(range(start, start + length))
        start += length
    return found


def make_plans(
    like: torch.Tensor, widths: tuple[int, int, int], chunk_tokens: int, max_model_len: int
) -> None:
    """Have cuDNN make this thread's plans of all parts that chunks can have.

    Args:
        like: A query.
        widths: KV heads, and numbers of K and of V in each.
    """
    most = min(chunk_tokens, SEGMENT)
    if chunk_tokens < MIN_TOKENS // 2 or not can_attend(like, widths[2]):
        return
    side = _triangle_rows(most + KEYS_STEP)
    query = like.new_zeros((1, max(side, _rectangle_rows(most)), *like.shape[1:]))
    num_heads, key_dim, value_dim = widths
    keys = like.new_zeros((1, max(side, max_model_len), num_heads, key_dim))
    values = like.new_zeros((*keys.shape[:3], value_dim))
    for length in range(TRIANGLE_STEP, side + 1, TRIANGLE_STEP):
        attend_part(query[:, :length], keys[:, :length], values[:, :length], True, 1.0)
    for seen in (KEYS_STEP << doubled for doubled in range((max_model_len // KEYS_STEP).bit_length())):
        for rows in RECTANGLE_ROWS:
            if rows <= _rectangle_rows(most):
                attend_part(query[:, :rows], keys[:, :seen], values[:, :seen], False, 1.0)
    if max_model_len > KEYS_STEP:
        # The merge is compiled twice: for sums that begin at a multiple of 16 bytes, and for others.
        for before in (KEYS_STEP, KEYS_STEP + 1):
            own = keys[0, : before + 1], values[0, : before + 1]
            _attend_segment(query[0, :1], *own, ChunkSegment(0, 1, before), 1.0)


def attend_long(
    query: torch.Tensor,
    seen: Seen,
    tables: torch.Tensor,
    chunks: list[LongChunk],
    scale: float,
    most: int = SEGMENT,
) -> torch.Tensor:
    """Return the causal attention of chunks, [num_rows, num_heads, width of V].

    Args:
        query: [num_rows, num_heads, head_dim]; the chunks' rows follow each other from the first, and the
            rest is padding.
        seen: Gives K and V of a chunk's sequence; those of the chunk are in the cache already.
        tables: [>= len(chunks), max_blocks] int32; each chunk's blocks.
        most: Rows of a segment at most.
    """
    found: list[torch.Tensor] = []
    row = 0
    for chunk, table in zip(chunks, tables, strict=False):
        rows = slice(row, row + chunk.num_tokens)
        both = seen(rows, table, chunk)
        found += [
            _attend_segment(query[segment.row : segment.row + segment.num_rows], *both, segment, scale)
            for segment in segments_of(chunk, row, most)
        ]
        row += chunk.num_tokens
    if len(found) == 1 and row == query.shape[0]:
        return found[0]
    output = query.new_empty((*query.shape[:2], found[0].shape[2]))
    torch.cat(found, out=output[:row])
    return output


def _attend_segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: ChunkSegment, scale: float
) -> torch.Tensor:
    """Return the attention of a segment's rows to its sequence's keys, [tokens, num_kv_heads, head_dim]."""
    # Keys before the segment that no rectangle has go to the triangle.
    num_rows, skipped = segment.num_rows, segment.before % KEYS_STEP
    length = _triangle_rows(skipped + num_rows)
    first, end = segment.before - skipped, segment.before + num_rows
    asked = _padded(query, skipped, length)
    own_keys, own_values = (_padded(item[first:end], 0, length) for item in (keys, values))
    both, sums = attend_part(asked, own_keys, own_values, True, scale)
    output, lse = both[0, skipped : skipped + num_rows], sums[0, :, skipped : skipped + num_rows]
    if first:
        asked = _padded(query, 0, _rectangle_rows(num_rows))
    for seen in rectangles_of(first):
        within = slice(seen.start, seen.stop)
        part, part_lse = attend_part(asked, keys[None, within], values[None, within], False, scale)
        merge_part(output, lse, part[0, :num_rows], part_lse[0, :, :num_rows])
    return output


def _padded(rows: torch.Tensor, before: int, length: int) -> torch.Tensor:
    """Return a batch of one, [1, length, heads, head_dim]: `before` zeros, the rows, and zeros."""
    # Zeros, because a weight of nought times whatever is there may be no number.
    after = length - before - rows.shape[0]
    return (pad(rows, (0, 0, 0, 0, before, after)) if before or after else rows)[None]


def _triangle_rows(num_rows: int) -> int:
    return -(-num_rows // TRIANGLE_STEP) * TRIANGLE_STEP


def _rectangle_rows(num_rows: int) -> int:
    return next(rows for rows in RECTANGLE_ROWS if rows >= num_rows)


def seen_heads(
    own: tuple[torch.Tensor, torch.Tensor],
    kv_layer: torch.Tensor,
    lens: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> Seen:
    """Return what gives K and V of heads, each [>= tokens, num_kv_heads, head_dim].

    Args:
        own: K and V of the step's tokens, each [num_rows, num_kv_heads, head_dim].
        kv_layer: One layer of the paged cache.
        lens: [>= 1] int32; the context of each chunk.
        scales: Those of a layer of 8 bits.
    """

    def seen(rows: slice, table: torch.Tensor, chunk: LongChunk) -> tuple[torch.Tensor, torch.Tensor]:
        # Without a prefix, the keys are rows of this step; but of 8 bits, other chunks see those.
        if not chunk.prefix and scales is None:
            return _ended(own[0][rows], chunk, lens), _ended(own[1][rows], chunk, lens)
        blocks = blocks_of(table, chunk, kv_layer.shape[2])
        if scales is None:
            return selected(kv_layer[:, 0], blocks), selected(kv_layer[:, 1], blocks)
        keys, values = read_scaled(kv_layer, scales, blocks, own[0].dtype)
        return _ended(keys, chunk, lens), _ended(values, chunk, lens)

    return seen


def seen_latents(
    layer: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, nope_dim: int, lens: torch.Tensor
) -> Seen:
    """Return what gives K and V made of a sequence's latents; arguments as `latent_attention.py : expanded`.

    Args:
        layer: Latents and rotary keys of one layer, each [num_blocks, block_size, 1, width].
        lens: [>= 1] int32; the context of each chunk.
    """

    def seen(rows: slice, table: torch.Tensor, chunk: LongChunk) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = blocks_of(table, chunk, layer[0].shape[1])
        latents, rotary_keys = (_ended(selected(field, blocks)[:, 0], chunk, lens) for field in layer)
        return expanded(latents, rotary_keys, weight, nope_dim)

    return seen


def _ended(rows: torch.Tensor, chunk: LongChunk, lens: torch.Tensor) -> torch.Tensor:
    """Return the rows of a sequence, [>= tokens, ...], with zeros after the end of a padded chunk.

    What lies there is others' or nobody's, and a weight of nought times that may be no number."""
    if not chunk.is_padded:
        return rows
    is_after = torch.arange(len(rows), device=rows.device) >= lens[0]
    return rows.masked_fill(is_after.view(-1, *(1,) * (rows.dim() - 1)), 0)


def blocks_of(table: torch.Tensor, chunk: LongChunk, block_size: int) -> torch.Tensor:
    """Return the blocks of a chunk's sequence up to the chunk's end."""
    return table[: -(-(chunk.prefix + chunk.num_tokens) // block_size)]


def selected(field: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return some blocks of a field [num_blocks, block_size, heads, width], as rows of tokens."""
    return field.view(torch.uint8).index_select(0, blocks).view(field.dtype).flatten(0, 1)


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [1, rows, heads, head_dim] of such a query over [1, keys, kv_heads, head_dim], and its
    lse [1, heads, rows] float32."""
    # Of one batch, whose stride no cut can change: a plan is for strides.
    query, key, value = (item[0].contiguous()[None].transpose(1, 2) for item in (query, key, value))
    if not query.is_cuda:
        return _attend_part_definition(query, key, value, is_causal, scale)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return found[0].transpose(1, 2), found[1].flatten(2)


def _attend_part_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (item.float().repeat_interleave(group, dim=1) for item in (key, value))
    scores = query.float() @ key.transpose(2, 3) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    mixed = (scores.softmax(-1) @ value).to(query.dtype)
    return mixed.transpose(1, 2), scores.logsumexp(-1)
