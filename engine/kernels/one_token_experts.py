"""Products of one token with the experts that it is routed to: launcher and two kernels.

One token has a pair with each of its experts, so there is nothing to put in order: a program reads some rows
of one expert's gate and up, another the same rows of all of the token's experts' down, and adds them up. Sums
over the inputs that share a scale are multiplied by it.
"""

from __future__ import annotations

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
from engine.kernels.many_pairs import Tally

COLUMNS, STEP = 2, 2048
"""Rows of gate and of up that a program reads, and numbers of a row at a time."""

DOWN_COLUMNS, DOWN_STEP = 2, 256
"""Rows of down that a program reads, and numbers of a row at a time, of each expert."""


def one_token_experts(
    row: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tally: Tally | None = None,
    scales: ExpertScales | None = None,
) -> torch.Tensor:
    """Return the weighted sum of what a token's experts make of it, [1, hidden], silu-gated.

    Arguments are as for `grouped_experts`, of one token; floats may be of any dtype.

    Raises ValueError for a shape or stride that the kernels do not take."""
    (num_tokens, hidden), num_experts, inner = row.shape, len(down), inputs_of(down)
    chosen = experts.shape[1]
    if num_tokens != 1 or experts.shape != weights.shape or len(experts) != 1:
        shapes = f"{num_tokens} rows, experts {tuple(experts.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes} are not of one token")
    require_experts(hidden, gate_up, down, scales)
    row, experts, weights = row.contiguous(), experts.contiguous(), weights.contiguous()
    between = row.new_empty((chosen, inner))
    output = torch.empty_like(row)
    choices, slots = tally or (experts, experts)
    gate_up_scales, down_scales = (scales.gate_up, scales.down) if scales else (gate_up, down)
    (group, _), (down_group, _) = launch_groups(scales, hidden, inner, STEP)
    is_scaled = scales is not None
    _gate_up_rows[(triton.cdiv(inner, COLUMNS), chosen)](
        row, gate_up, gate_up_scales, between, experts, choices, slots, num_experts, hidden, inner,
        IS_COUNTED=tally is not None, COLUMNS=COLUMNS, STEP=STEP,
        IS_SCALED=is_scaled, GROUP=group, num_warps=4,
    )  # fmt: skip
    _down_rows[(triton.cdiv(hidden, DOWN_COLUMNS),)](
        between, down, down_scales, output, experts, weights, num_experts, hidden, inner, chosen,
        CHOSEN_PAD=triton.next_power_of_2(chosen), COLUMNS=DOWN_COLUMNS, STEP=DOWN_STEP,
        IS_SCALED=is_scaled, GROUP=down_group, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _times_scales(
    w, scale, is_row, start, num_groups, ROWS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr
):
    """Return levels, float32 [ROWS, STEP] of whole groups or within one, less zero points, times scales."""
    if GROUP > STEP:
        of_row = tl.load(scale + start // GROUP, mask=is_row, other=0)
        scales, zeros = _scales_and_zeros(tl.broadcast_to(of_row[:, None], [ROWS, STEP]))
    else:
        group = start // GROUP + tl.arange(0, STEP // GROUP)
        mask = is_row[:, None] & (group < num_groups)[None, :]
        of_group = tl.load(scale[:, None] + group[None, :], mask=mask, other=0)
        of_input = tl.broadcast_to(of_group[:, :, None], [ROWS, STEP // GROUP, GROUP])
        scales, zeros = _scales_and_zeros(tl.reshape(of_input, [ROWS, STEP]))
    return (w - zeros) * scales


@triton.jit
def _gate_up_rows(
    row,  # [hidden]
    gate_up,  # [num_experts, 2 * inner, hidden]
    scales,  # [num_experts, 2 * inner, num_groups]
    between,  # [num_chosen, inner]
    experts,  # [num_chosen]
    choices,  # [num_experts]
    slots,  # [1]
    num_experts,
    hidden,
    inner,
    IS_COUNTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
):
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert >= num_experts:
        return
    if IS_COUNTED:
        is_counted = (tl.program_id(0) == 0) & (tl.load(slots) >= 0)
        tl.atomic_add(choices + expert, 1, mask=is_counted, sem="relaxed")
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    gate_row = _row_pointers(gate_up, expert * 2 * inner + column, hidden)
    up_row = _row_pointers(gate_up, expert * 2 * inner + inner + column, hidden)
    num_groups = tl.cdiv(hidden, GROUP) if GROUP else 1
    scale = scales + (expert * 2 * inner + column) * num_groups
    is_column = column < inner
    gate = tl.zeros([COLUMNS, STEP], tl.float32)
    up = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in range(0, hidden, STEP):
        left = start + steps < hidden
        x = tl.load(row + start + steps, mask=left, other=0.0).to(tl.float32)[None, :]
        gate_part = _weights(gate_row, is_column, start, hidden, STEP).to(tl.float32)
        up_part = _weights(up_row, is_column, start, hidden, STEP).to(tl.float32)
        if GROUP:
            gate_part = _times_scales(gate_part, scale, is_column, start, num_groups, COLUMNS, STEP, GROUP)
            of_up = scale + inner * num_groups
            up_part = _times_scales(up_part, of_up, is_column, start, num_groups, COLUMNS, STEP, GROUP)
        gate += gate_part * x
        up += up_part * x
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if IS_SCALED and not GROUP:
        gate_sum *= tl.load(scale, mask=is_column, other=0.0)
        up_sum *= tl.load(scale + inner, mask=is_column, other=0.0)
    made = gate_sum * tl.sigmoid(gate_sum) * up_sum
    tl.store(between + pair * inner + column, made, mask=is_column)


@triton.jit
def _down_rows(
    between,  # [num_chosen, inner]
    down,  # [num_experts, hidden, inner]
    scales,  # [num_experts, hidden, num_groups]
    output,  # [hidden]
    experts,  # [num_chosen]
    weights,  # [num_chosen]
    num_experts,
    hidden,
    inner,
    num_chosen,
    CHOSEN_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all inputs
):
    # The rows of a tile: COLUMNS of the first expert, then as many of the next.
    at = tl.arange(0, CHOSEN_PAD * COLUMNS)
    pair = at // COLUMNS
    column = tl.program_id(0) * COLUMNS + at % COLUMNS
    expert = tl.load(experts + pair, mask=pair < num_chosen, other=num_experts)
    inside = (expert < num_experts) & (column < hidden)
    weight = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
    steps = tl.arange(0, STEP)
    down_row = _row_pointers(down, expert * hidden + column, inner)
    rows = between + pair[:, None] * inner + steps[None, :]
    num_groups = tl.cdiv(inner, GROUP) if GROUP else 1
    scale = scales + (expert * hidden + column) * num_groups
    if IS_SCALED and not GROUP:
        weight *= tl.load(scale, mask=inside, other=0.0)
    total = tl.zeros([CHOSEN_PAD * COLUMNS, STEP], tl.float32)
    for start in range(0, inner, STEP):
        mask = inside[:, None] & (start + steps < inner)[None, :]
        w = _weights(down_row, inside, start, inner, STEP).to(tl.float32)
        if GROUP:
            w = _times_scales(w, scale, inside, start, num_groups, CHOSEN_PAD * COLUMNS, STEP, GROUP)
        total += w * tl.load(rows + start, mask=mask, other=0.0).to(tl.float32)
    sums = tl.reshape(tl.sum(total, 1) * weight, [CHOSEN_PAD, COLUMNS])
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(output + column, tl.sum(sums, 0), mask=column < hidden)
