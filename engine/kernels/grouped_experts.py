"""Products of tokens with the experts that each is routed to: launchers and kernels.

Four launches, none of which needs to know on the host how many tokens an expert has, so that a CUDA graph
serves any routing: pairs of a token and an expert are put in the order of experts; each expert's rows go
through gate, up and the activation between them; and through down to a row for each pair; these are weighted
and added (`many_pairs.py`). The weights of an expert that has no token are not read. Levels are widened to
the rows' dtype beside the tensor cores, and the sums of a group are multiplied by its scale.

Tiles are numbered as those of chunks are (`paged_prefill.py`): expert e begins at `starts[e] // ROWS + e`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.expert_scales import (
    ExpertScales,
    _row_pointers,
    _scales_and_zeros,
    _weights,
    inputs_of,
    launch_groups,
    require_experts,
)
from engine.kernels.many_pairs import Tally, added_up, ordered_pairs
from engine.kernels.paged_prefill import _chunk_of_tile

MAX_PAIRS = 4096
"""Pairs that one program puts in order; of more, several do, and torch's product of bfloat16 is faster."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Launch parameters that change speed and not the result (but for rounding)."""

    rows: int
    columns: int
    step: int
    """Numbers of a row at a time."""
    num_warps: int
    num_stages: int


def expert_tiles(num_pairs: int, num_experts: int, scales: ExpertScales | None = None) -> ExpertTiles:
    """Choose a launch by the rows that an expert has in the mean, and by how much work its levels are."""
    mean = num_pairs / num_experts
    if scales is not None:
        return _level_tiles(mean, scales)
    if mean <= 0.25:
        return ExpertTiles(16, 64, 64, num_warps=4, num_stages=4)
    # One H200, 64 experts of 2048 by 1,408, us: where the 384 pairs of 64 tokens are spread evenly 269, with
    # 16 rows 263 and with 64 rows 273; where they go to 6 of them 54, 77 and 53.
    if mean <= 4:
        return ExpertTiles(16, 32, 128, num_warps=2, num_stages=4)
    if mean <= 8:
        return ExpertTiles(32, 64, 128, num_warps=4, num_stages=3)
    return ExpertTiles(64, 64, 64, num_warps=4, num_stages=3)


def _level_tiles(mean: float, scales: ExpertScales) -> ExpertTiles:
    """Choose a launch where each tile of rows widens the levels anew: few rows take as long as many."""
    # One H200, the same experts, 384 pairs spread evenly, us: of fp8 198, with the tiles of floats 248; with
    # a scale for each 128 inputs 202 and 292; of four bits 256 and 369.
    if mean <= 16:
        has_groups = max(each.shape[-1] for each in scales[:2]) > 1 or scales.down.dtype == torch.int32
        if has_groups:
            return ExpertTiles(16, 32, 256, num_warps=4, num_stages=3)
        return ExpertTiles(16, 64, 128, num_warps=4, num_stages=4)
    if mean <= 24:
        return ExpertTiles(32, 64, 128, num_warps=4, num_stages=3)
    return ExpertTiles(64, 64, 64, num_warps=4, num_stages=3)


def grouped_experts(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tiles: ExpertTiles | None = None,
    tally: Tally | None = None,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """Return each token's weighted sum of what its experts make of it, [num_tokens, hidden], silu-gated.

    Args:
        rows: [num_tokens, hidden], contiguous.
        gate_up: [num_experts, 2 * inner, hidden], contiguous; of the rows' dtype, or levels of `scales`, of
            which two of four bits lie in a byte.
        down: [num_experts, hidden, inner], contiguous; as `gate_up`.
        experts: [num_tokens, num_chosen] int64; `num_experts` and above: another rank's, which adds nothing.
        weights: [num_tokens, num_chosen]

    Raises ValueError for a shape, stride or dtype that the kernels do not take."""
    num_tokens, hidden = rows.shape
    num_experts, inner = gate_up.shape[0], inputs_of(down)
    num_pairs = experts.numel()
    require_experts(hidden, gate_up, down, scales)
    if not rows.is_contiguous():
        raise ValueError("rows must be contiguous")
    if experts.shape != weights.shape or experts.shape[0] != num_tokens:
        raise ValueError(f"experts {tuple(experts.shape)} and weights {tuple(weights.shape)} differ")
    tiles = tiles or expert_tiles(num_pairs, num_experts, scales)
    experts, weights = experts.contiguous(), weights.contiguous()
    order, starts = _ordered(experts, num_experts, tally)
    between = rows.new_empty((num_pairs, inner))
    made = rows.new_empty((num_pairs, hidden))
    num_tiles = num_pairs // tiles.rows + num_experts
    gate_up_scales, down_scales = (scales.gate_up, scales.down) if scales else (gate_up, down)
    of_gate_up, of_down = launch_groups(scales, hidden, inner, tiles.step)
    (gate_up_groups, gate_up_step), (down_groups, down_step) = of_gate_up, of_down
    shape = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "IS_SCALED": scales is not None}
    launch = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    _gate_up_tile[(triton.cdiv(inner, tiles.columns), num_tiles)](
        rows, gate_up, gate_up_scales, between, order, starts, num_experts, hidden, inner, experts.shape[1],
        STEP=gate_up_step, GROUP=gate_up_groups, **shape, **launch,
    )  # fmt: skip
    _down_tile[(triton.cdiv(hidden, tiles.columns), num_tiles)](
        between, down, down_scales, made, order, starts, num_experts, hidden, inner,
        STEP=down_step, GROUP=down_groups, **shape, **launch,
    )  # fmt: skip
    return added_up(made, None, experts, weights, num_experts)


def _ordered(
    experts: torch.Tensor, num_experts: int, tally: Tally | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pair of each place in the order of experts, and where each expert's places start."""
    num_pairs = experts.numel()
    if num_pairs > MAX_PAIRS:
        _, places, ends = ordered_pairs(experts, num_experts, tally)
        pairs = torch.arange(num_pairs, dtype=torch.int32, device=experts.device)
        order = torch.empty_like(pairs).scatter_(0, places.long(), pairs)
        return order, torch.cat([ends.new_zeros(1), ends])
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    cursors = torch.empty_like(starts)
    choices, slots = tally or (starts, starts)
    _order_pairs[(1,)](
        experts, order, starts, cursors, choices, slots, num_pairs, num_experts, experts.shape[1],
        IS_COUNTED=tally is not None, PAIRS_PAD=max(16, triton.next_power_of_2(num_pairs)),
        EXPERTS_PAD=triton.next_power_of_2(num_experts + 1), num_warps=8,
    )  # fmt: skip
    return order, starts


@triton.jit
def _order_pairs(
    experts,  # [num_pairs]
    order,  # [num_pairs]
    starts,  # [num_experts + 1]
    cursors,  # [num_experts + 1]
    choices,  # [num_experts]
    slots,  # [num_tokens]
    num_pairs,
    num_experts,
    num_chosen,
    IS_COUNTED: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
):
    """Put pairs in the order of their experts; within one, the order does not matter."""
    pairs = tl.arange(0, PAIRS_PAD)
    is_pair = pairs < num_pairs
    expert = tl.load(experts + pairs, mask=is_pair, other=num_experts).to(tl.int32)
    expert = tl.minimum(expert, num_experts)
    counts = tl.histogram(expert, EXPERTS_PAD)
    ids = tl.arange(0, EXPERTS_PAD)
    firsts = tl.cumsum(counts, 0) - counts
    tl.store(starts + ids, firsts, mask=ids <= num_experts)
    tl.store(cursors + ids, firsts, mask=ids <= num_experts)
    tl.debug_barrier()
    place = tl.atomic_add(cursors + expert, 1, mask=is_pair & (expert < num_experts))
    tl.store(order + place, pairs, mask=is_pair & (expert < num_experts))
    if IS_COUNTED:
        is_token = tl.load(slots + pairs // num_chosen, mask=is_pair, other=-1) >= 0
        ones = tl.full([PAIRS_PAD], 1, tl.int64)
        tl.atomic_add(choices + expert, ones, mask=is_token & (expert < num_experts), sem="relaxed")


@triton.jit
def _added_product(total, x, w, scale, is_column, begin, GROUP: tl.constexpr):
    """Return total + x @ w.T, times the scales of the group that input `begin` is in, if there are groups."""
    if GROUP:
        of_group, zero = _scales_and_zeros(tl.load(scale + begin // GROUP, mask=is_column, other=0))
        if w.dtype == tl.uint8:
            w = w.to(tl.float32) - zero[:, None]
        w = tl.trans(w.to(x.dtype))
        total += tl.dot(x, w, input_precision="ieee") * of_group[None, :]
    else:
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="ieee")
    return total


@triton.jit
def _gate_up_tile(
    rows,  # [num_tokens, hidden]
    gate_up,  # [num_experts, 2 * inner, hidden]
    scales,  # [num_experts, 2 * inner, num_groups]
    between,  # [num_pairs, inner]
    order,  # [num_pairs]
    starts,  # [num_experts + 1]
    num_experts,
    hidden,
    inner,
    num_chosen,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
):
    tile = tl.program_id(1)
    expert = _chunk_of_tile(starts, num_experts, tile, ROWS)
    start = tl.load(starts + expert)
    first = start + (tile - (start // ROWS + expert)) * ROWS
    end = tl.load(starts + expert + 1)
    if (first < start) | (first >= end):
        return
    at = first + tl.arange(0, ROWS)
    is_row = at < end
    token = tl.load(order + at, mask=is_row, other=0) // num_chosen
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < inner
    steps = tl.arange(0, STEP)
    source = rows + token.to(tl.int64)[:, None] * hidden + steps[None, :]
    gate_row = _row_pointers(gate_up, expert.to(tl.int64) * 2 * inner + column, hidden)
    up_row = _row_pointers(gate_up, expert.to(tl.int64) * 2 * inner + inner + column, hidden)
    num_groups = tl.cdiv(hidden, GROUP) if GROUP else 1
    scale = scales + (expert * 2 * inner + column) * num_groups
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, hidden, STEP):
        left = (begin + steps < hidden)[None, :]
        x = tl.load(source + begin, mask=is_row[:, None] & left, other=0.0)
        w = _weights(gate_row, is_column, begin, hidden, STEP)
        gate = _added_product(gate, x, w, scale, is_column, begin, GROUP)
        w = _weights(up_row, is_column, begin, hidden, STEP)
        up = _added_product(up, x, w, scale + inner * num_groups, is_column, begin, GROUP)
    if IS_SCALED and not GROUP:
        gate *= tl.load(scale, mask=is_column, other=0.0)[None, :]
        up *= tl.load(scale + inner, mask=is_column, other=0.0)[None, :]
    made = gate * tl.sigmoid(gate) * up
    target = between + at.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, made, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down_tile(
    between,  # [num_pairs, inner]
    down,  # [num_experts, hidden, inner]
    scales,  # [num_experts, hidden, num_groups]
    output,  # [num_pairs, hidden]
    order,  # [num_pairs]
    starts,  # [num_experts + 1]
    num_experts,
    hidden,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
):
    tile = tl.program_id(1)
    expert = _chunk_of_tile(starts, num_experts, tile, ROWS)
    start = tl.load(starts + expert)
    first = start + (tile - (start // ROWS + expert)) * ROWS
    end = tl.load(starts + expert + 1)
    if (first < start) | (first >= end):
        return
    at = first + tl.arange(0, ROWS)
    is_row = at < end
    pair = tl.load(order + at, mask=is_row, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < hidden
    steps = tl.arange(0, STEP)
    source = between + at.to(tl.int64)[:, None] * inner + steps[None, :]
    down_row = _row_pointers(down, expert.to(tl.int64) * hidden + column, inner)
    scale = scales + (expert * hidden + column) * (tl.cdiv(inner, GROUP) if GROUP else 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inner, STEP):
        left = (begin + steps < inner)[None, :]
        x = tl.load(source + begin, mask=is_row[:, None] & left, other=0.0)
        w = _weights(down_row, is_column, begin, inner, STEP)
        total = _added_product(total, x, w, scale, is_column, begin, GROUP)
    if IS_SCALED and not GROUP:
        total *= tl.load(scale, mask=is_column, other=0.0)[None, :]
    target = output + pair.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(target, total, mask=is_row[:, None] & is_column[None, :])
