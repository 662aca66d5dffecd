"""Products of one token with the experts that it is routed to: launcher and two kernels.

One token has a pair with each of its experts, so there is nothing to put in order: a program reads some rows
of one expert's gate and up, another the same rows of all of the token's experts' down, and adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.many_pairs import Tally

COLUMNS, STEP = 2, 2048
"""Rows of gate and of up that a program reads, and numbers of a row at a time."""

DOWN_COLUMNS, DOWN_STEP = 2, 256
"""The same of down, of each expert."""


def one_token_experts(
    row: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tally: Tally | None = None,
) -> torch.Tensor:
    """Return the weighted sum of what a token's experts make of it, [1, hidden], silu-gated.

    Args:
        row: [1, hidden]
        gate_up: [num_experts, 2 * inner, hidden], contiguous.
        down: [num_experts, hidden, inner], contiguous.
        experts: [1, num_chosen] int64; `num_experts` and above: another rank's, which adds nothing.
        weights: [1, num_chosen]

    Raises ValueError for a shape or stride that the kernels do not take."""
    (num_tokens, hidden), (num_experts, _, inner), chosen = row.shape, down.shape, experts.shape[1]
    if num_tokens != 1 or experts.shape != weights.shape or len(experts) != 1:
        shapes = f"{num_tokens} rows, experts {tuple(experts.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes} are not of one token")
    if gate_up.shape != (num_experts, 2 * inner, hidden) or down.shape[1] != hidden:
        raise ValueError(
            f"experts {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit a row of {hidden}"
        )
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("experts must be contiguous")
    row, experts, weights = row.contiguous(), experts.contiguous(), weights.contiguous()
    between = row.new_empty((chosen, inner))
    output = torch.empty_like(row)
    choices, slots = tally or (experts, experts)
    _gate_up_rows[(triton.cdiv(inner, COLUMNS), chosen)](
        row, gate_up, between, experts, choices, slots, num_experts, hidden, inner,
        IS_COUNTED=tally is not None, COLUMNS=COLUMNS, STEP=STEP, num_warps=4,
    )  # fmt: skip
    _down_rows[(triton.cdiv(hidden, DOWN_COLUMNS),)](
        between, down, output, experts, weights, num_experts, hidden, inner, chosen,
        CHOSEN_PAD=triton.next_power_of_2(chosen), COLUMNS=DOWN_COLUMNS, STEP=DOWN_STEP, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _gate_up_rows(
    row,  # [hidden]
    gate_up,  # [num_experts, 2 * inner, hidden]
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
):
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert >= num_experts:
        return
    if IS_COUNTED:
        is_counted = (tl.program_id(0) == 0) & (tl.load(slots) >= 0)
        tl.atomic_add(choices + expert, 1, mask=is_counted, sem="relaxed")
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < inner)[:, None]
    steps = tl.arange(0, STEP)
    source = gate_up + (expert * 2 * inner + column[:, None]) * hidden + steps[None, :]
    up_offset = inner.to(tl.int64) * hidden
    gate = tl.zeros([COLUMNS, STEP], tl.float32)
    up = tl.zeros([COLUMNS, STEP], tl.float32)
    for start in range(0, hidden, STEP):
        left = start + steps < hidden
        mask = inside & left[None, :]
        x = tl.load(row + start + steps, mask=left, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(source + start, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(source + up_offset + start, mask=mask, other=0.0).to(tl.float32) * x
    gate_sum = tl.sum(gate, 1)
    made = gate_sum * tl.sigmoid(gate_sum) * tl.sum(up, 1)
    tl.store(between + pair * inner + column, made, mask=column < inner)


@triton.jit
def _down_rows(
    between,  # [num_chosen, inner]
    down,  # [num_experts, hidden, inner]
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
):
    # The rows of a tile: COLUMNS of the first expert, then as many of the next.
    at = tl.arange(0, CHOSEN_PAD * COLUMNS)
    pair = at // COLUMNS
    column = tl.program_id(0) * COLUMNS + at % COLUMNS
    expert = tl.load(experts + pair, mask=pair < num_chosen, other=num_experts)
    inside = (expert < num_experts) & (column < hidden)
    weight = tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)
    steps = tl.arange(0, STEP)
    source = down + (expert * hidden + column)[:, None] * inner + steps[None, :]
    rows = between + pair[:, None] * inner + steps[None, :]
    total = tl.zeros([CHOSEN_PAD * COLUMNS, STEP], tl.float32)
    for start in range(0, inner, STEP):
        mask = inside[:, None] & (start + steps < inner)[None, :]
        w = tl.load(source + start, mask=mask, other=0.0).to(tl.float32)
        total += w * tl.load(rows + start, mask=mask, other=0.0).to(tl.float32)
    sums = tl.reshape(tl.sum(total, 1) * weight, [CHOSEN_PAD, COLUMNS])
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(output + column, tl.sum(sums, 0), mask=column < hidden)
