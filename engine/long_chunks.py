"""Attention of long chunks by cuDNN, which is faster than the paged kernel, in parts that suit it.

cuDNN takes contiguous K and V, no paged ones, and its causal mask begins at the first key. So
a chunk is cut into segments, and each attends in parts that are merged by their lse
(`kernels/merge_part.py`):

    keys     0 ....................... before | before + num_rows
             rectangles, seen by every row    | triangle, the segment's own

Rectangles are what it is fastest at: 690 TFLOP/s, against 530 to 650 of a triangle and 421 of the
paged kernel (32 heads of 128, one H200, 2026-11-21). Keys of
a cached prefix are gathered out of their blocks first, at the memory's speed. The first call with
new lengths or strides takes cuDNN 40 ms, so there are few: multiples of `ROWS_STEP` rows, and of
`KEYS_RUN` keys or less than one; what is less than `KEYS_STEP` goes to the triangle, behind queries that
nobody reads. Strides are the lengths' own: a batch of one is made of the rows that are
attended to, not of all that there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from engine.kernels.merge_part import merge_part
from engine.step import StepEntry, StepPlan

MIN_TOKENS = 2048
"""From this length on a chunk comes here; with a prefix of `MIN_PREFIX` from half of it."""
MIN_PREFIX = 4096
MAX_LONG_CHUNKS = 32
"""Of one step; there is no gain in many small ones."""

SEGMENT = 16_384
"""Rows of a triangle at most. Cut in two, one of 16,384 takes 6 ms more of 478 ms of prefill; one of
32,768 as long as it does whole."""
KEYS_RUN = 8192
ROWS_STEP = 512
KEYS_STEP = 2048
MAX_HEAD_DIM = 128


def first_met(chunk_tokens: int, max_model_len: int) -> list[LongChunk]:
    """Return whole chunks that together have all lengths of parts which whole chunks can have.

    Whoever runs them before the first request spares the prompts that would be the first to need a length.
    """
    if chunk_tokens < MIN_TOKENS:
        return []
    left_over = [number * KEYS_STEP + number * ROWS_STEP for number in range(KEYS_RUN // KEYS_STEP)]
    runs = range(KEYS_RUN, max_model_len, KEYS_RUN)
    prefixes = [*left_over, KEYS_STEP - 1, *runs]
    return [LongChunk(chunk_tokens, prefix) for prefix in prefixes if prefix + chunk_tokens <= max_model_len]


class LongChunk(NamedTuple):
    """A chunk that is attended here."""

    num_tokens: int
    prefix: int
    """Tokens before it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a chunk."""

    row: int
    """First one, among all rows of the step."""
    num_rows: int
    before: int
    """Tokens of the sequence before them."""

    @property
    def num_left_over(self) -> int:
        """Keys before the segment that no rectangle has."""
        return self.before % KEYS_STEP


def long_chunks(plan: StepPlan) -> list[LongChunk]:
    """Return a step's chunks if all of them, one at least, come here; otherwise none."""
    entries = plan.entries[plan.num_single :]
    if not entries or len(entries) > MAX_LONG_CHUNKS or not all(map(_is_long, entries)):
        return []
    return [LongChunk(entry.num_tokens, entry.start) for entry in entries]


def _is_long(entry: StepEntry) -> bool:
    return entry.num_tokens >= (MIN_TOKENS // 2 if entry.start >= MIN_PREFIX else MIN_TOKENS)


def can_attend(query: torch.Tensor) -> bool:
    """Return whether cuDNN takes such heads. On a CPU the definition takes any."""
    is_short = query.dtype in (torch.float16, torch.bfloat16)
    return not query.is_cuda or (is_short and query.shape[2] <= MAX_HEAD_DIM and query.shape[2] % 8 == 0)


def segments_of(chunk: LongChunk, row: int, most: int) -> list[Segment]:
    """Cut a chunk that begins at `row` into segments of at most `most` rows."""
    return [
        Segment(row + at, min(most, chunk.num_tokens - at), chunk.prefix + at)
        for at in range(0, chunk.num_tokens, most)
    ]


def rectangles_of(num_keys: int) -> list[range]:
    """Cut so many leading keys, a multiple of `KEYS_STEP`, into ranges of few different lengths."""
    most = num_keys // KEYS_RUN * KEYS_RUN
    return [keys for keys in (range(most), range(most, num_keys)) if keys]


Cut = list[tuple[Segment, torch.Tensor, torch.Tensor]]
"""Segments, each with the K and V of its sequence's tokens from the first."""


def attend_long(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    kv_layer: torch.Tensor,
    tables: torch.Tensor,
    chunks: list[LongChunk],
    scale: float,
    most: int = SEGMENT,
) -> torch.Tensor:
    """Return the causal attention of chunks, as `query`.

    Args:
        query: [num_rows, num_heads, head_dim]; the chunks' rows follow each other from the first,
            and what is behind them is padding.
        own: K and V of the same tokens, each [num_rows, num_kv_heads, head_dim].
        kv_layer: One layer of the paged cache, in which those are written already.
        tables: [>= len(chunks), max_blocks] int32; each chunk's blocks.
        most: Rows of a segment.
    """
    cut: Cut = []
    row = 0
    for chunk, table in zip(chunks, tables, strict=False):
        # Without a prefix, the keys before a segment are rows of this step.
        keys, values = _gathered(kv_layer, table, chunk) if chunk.prefix else (own[0][row:], own[1][row:])
        cut += [(segment, keys, values) for segment in segments_of(chunk, row, most)]
        row += chunk.num_tokens
    output, sums = _triangles(query, own, cut, scale)
    for (segment, keys, values), lse in zip(cut, sums, strict=True):
        rows = slice(segment.row, segment.row + segment.num_rows)
        asked = query[segment.row : segment.row + _rounded(segment.num_rows)]
        for seen in rectangles_of(segment.before - segment.num_left_over):
            within = slice(seen.start, seen.stop)
            part, part_lse = attend_part(asked[None], keys[within][None], values[within][None], False, scale)
            merge_part(output[rows], lse, part[0, : segment.num_rows], part_lse[0, :, : segment.num_rows])
    return output


def _triangles(
    query: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], cut: Cut, scale: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attend to each segment's own keys and those left over; return the result, and the lse of each."""
    sums: list[torch.Tensor] = []
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in _alike(segment for segment, _, _ in cut):
        first, count = group[0], len(group)
        start, num_rows = first.row, first.num_rows
        if first.num_left_over:
            part, lse = _triangle_after(query, *cut[len(sums)], scale)
        else:
            # Rows of others, or of padding, make up the length: causality keeps them out of ours.
            stop = min(start + (count - 1) * num_rows + _rounded(num_rows), query.shape[0])
            shape = (count, (stop - start) // count)
            q, k, v = (item[start:stop].view(*shape, *item.shape[1:]) for item in (query, *own))
            part, lse = attend_part(q, k, v, True, scale)
        sums += [of_one[:, :num_rows] for of_one in lse]
        part = part.flatten(0, 1)
        if count == len(cut) and part.shape[0] == query.shape[0]:
            return part, sums  # all there is: nothing is copied
        output[start : start + count * num_rows] = part[: count * num_rows]
    return output, sums


def _alike(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Group neighbours that are one batch: of equal length, with nothing left over."""
    groups: list[list[Segment]] = []
    for segment in segments:
        like = groups[-1][-1] if groups else None
        if (
            like is not None
            and not (like.num_left_over or segment.num_left_over or segment.num_rows % ROWS_STEP)
            and like.num_rows == segment.num_rows
        ):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _triangle_after(
    query: torch.Tensor, segment: Segment, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys left over too: queries that nobody reads stand before the segment's."""
    skipped, num_rows = segment.num_left_over, segment.num_rows
    length = _rounded(skipped + num_rows)
    asked = pad(
        query[segment.row : segment.row + num_rows], (0, 0, 0, 0, skipped, length - skipped - num_rows)
    )
    within = slice(segment.before - skipped, segment.before - skipped + length)
    part, lse = attend_part(asked[None], keys[within][None], values[within][None], True, scale)
    wanted = slice(skipped, skipped + num_rows)
    return part[:, wanted], lse[:, :, wanted]


def _gathered(
    kv_layer: torch.Tensor, table: torch.Tensor, chunk: LongChunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's K and V, each [>= tokens, num_kv_heads, head_dim], zeros after its last token."""
    num_tokens, block_size = chunk.prefix + chunk.num_tokens, kv_layer.shape[2]
    num_blocks = -(-num_tokens // block_size)
    both = kv_layer.new_empty((2, num_blocks * block_size + ROWS_STEP, *kv_layer.shape[3:]))
    for index, rows in enumerate(both):
        blocks = rows[:-ROWS_STEP].view(num_blocks, block_size, *rows.shape[1:])
        torch.index_select(kv_layer[:, index], 0, table[:num_blocks], out=blocks)
    both[:, num_tokens:] = 0  # a weight of nought times whatever is there may be no number
    return both[0], both[1]


def attend_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [batch, rows, heads, head_dim], and its lse [batch, heads, rows] float32.

    Args:
        query: [batch, rows, heads, head_dim]
        key, value: [batch, keys, kv_heads, head_dim]
    """
    query, key, value = (item.transpose(1, 2) for item in (query, key, value))
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


def _rounded(num_rows: int) -> int:
    return -(-num_rows // ROWS_STEP) * ROWS_STEP
