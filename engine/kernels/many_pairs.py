"""Kernels around the grouped products of many pairs of a token and an expert: order, gate and sum.

The products take rows in the order of experts, which two kernels put them into by counting. Between them
gate and up become one row; after them each token's rows, wherever they are, are weighted and added. Each
kernel reads its rows once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 1024
"""Numbers of a row at a time."""


class Tally(NamedTuple):
    """Where the choices of tokens are counted."""

    choices: torch.Tensor
    """[num_experts] int64, contiguous; added to."""
    slots: torch.Tensor
    """[>= num_tokens] int32, contiguous; -1: a token that is padding and does not count."""


def ordered_pairs(
    chosen: torch.Tensor, num_experts: int, tally: Tally | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put pairs in the order of their experts; within one, the order does not matter.

    Returns the token of each place [num_pairs] int32, the place of each pair [num_pairs] int32, and the end
    of each expert's places [num_experts] int32. Pairs of `num_experts` and above, another rank's, come last.

    Args:
        chosen: [num_tokens, num_chosen] int64, contiguous."""
    num_pairs = chosen.numel()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=chosen.device)
    grid = (triton.cdiv(num_pairs, TILE),)
    pad = triton.next_power_of_2(num_experts + 1)
    choices, slots = tally or (counts, counts)
    _count[grid](
        chosen, counts, choices, slots, num_pairs, num_experts, chosen.shape[1],
        IS_COUNTED=tally is not None, TILE=TILE, EXPERTS_PAD=pad, num_warps=4,
    )  # fmt: skip
    ends = counts.cumsum(0, dtype=torch.int32)
    tokens, places = torch.empty((2, num_pairs), dtype=torch.int32, device=chosen.device)
    _place[grid](
        chosen, counts, ends, tokens, places, num_pairs, num_experts, chosen.shape[1],
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    return tokens, places, ends[:-1]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [num_pairs, inner].

    Args:
        gate_up: [num_pairs, 2 * inner], contiguous: gate, then up.

    Raises ValueError for rows that are not contiguous."""
    if not gate_up.is_contiguous():
        raise ValueError("gate and up must be contiguous")
    num_pairs, inner = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((num_pairs, inner))
    if num_pairs:
        _gate_row[(num_pairs, triton.cdiv(inner, TILE))](gate_up, output, inner, TILE=TILE, num_warps=4)
    return output


def added_up(
    made: torch.Tensor,
    places: torch.Tensor | None,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Return each token's weighted sum, [num_tokens, hidden], summed in float32.

    Args:
        made: [num_pairs, hidden], contiguous.
        places: [num_pairs] int32; row of `made` of each pair, tokens' pairs one after the other. None: that
            is the order of `made`.
        chosen: [num_tokens, num_chosen] int64, contiguous; pairs of `num_experts` and above add nothing.
        weights: [num_tokens, num_chosen], contiguous.

    Raises ValueError for a shape or stride that the kernel does not take."""
    if not (made.is_contiguous() and chosen.is_contiguous() and weights.is_contiguous()):
        raise ValueError("rows, experts and weights must be contiguous")
    num_tokens, num_chosen = chosen.shape
    pairs = num_tokens * num_chosen
    if len(made) != pairs or (places is not None and len(places) != pairs) or weights.shape != chosen.shape:
        raise ValueError(f"{len(made)} rows, their places and weights do not fit {pairs} pairs")
    hidden = made.shape[1]
    output = made.new_empty((num_tokens, hidden))
    if num_tokens:
        _add_up[(num_tokens, triton.cdiv(hidden, TILE))](
            made, chosen if places is None else places, chosen, weights, output,
            hidden, num_experts, num_chosen, IN_ORDER=places is None, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return output


@triton.jit
def _count(
    chosen,  # [num_pairs]
    counts,  # [num_experts + 1], zeros
    choices,  # [num_experts]
    slots,  # [num_tokens]
    num_pairs,
    num_experts,
    num_chosen,
    IS_COUNTED: tl.constexpr,
    TILE: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
):
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_pair = pair < num_pairs
    expert = tl.minimum(tl.load(chosen + pair, mask=is_pair, other=0), num_experts).to(tl.int32)
    found = tl.histogram(expert, EXPERTS_PAD, mask=is_pair)
    ids = tl.arange(0, EXPERTS_PAD)
    tl.atomic_add(counts + ids, found, mask=found > 0)
    if IS_COUNTED:
        is_token = tl.load(slots + pair // num_chosen, mask=is_pair, other=-1) >= 0
        found = tl.histogram(expert, EXPERTS_PAD, mask=is_token)
        tl.atomic_add(choices + ids, found.to(tl.int64), mask=(found > 0) & (ids < num_experts))


@triton.jit
def _place(
    chosen,  # [num_pairs]
    counts,  # [num_experts + 1]; used up
    ends,  # [num_experts + 1]
    tokens,  # [num_pairs]
    places,  # [num_pairs]
    num_pairs,
    num_experts,
    num_chosen,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_pair = pair < num_pairs
    expert = tl.minimum(tl.load(chosen + pair, mask=is_pair, other=0), num_experts).to(tl.int32)
    left = tl.atomic_add(counts + expert, -1, mask=is_pair)
    place = tl.load(ends + expert, mask=is_pair, other=0) - left
    tl.store(places + pair, place, mask=is_pair)
    tl.store(tokens + place, pair // num_chosen, mask=is_pair)


@triton.jit
def _gate_row(
    gate_up,  # [num_pairs, 2 * inner]
    output,  # [num_pairs, inner]
    inner,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < inner
    source = gate_up + row * 2 * inner + place
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * inner + place, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _add_up(
    made,  # [num_pairs, hidden]
    places,  # [num_tokens * num_chosen]
    chosen,  # [num_tokens, num_chosen]
    weights,  # [num_tokens, num_chosen]
    output,  # [num_tokens, hidden]
    hidden,
    num_experts,
    num_chosen,
    IN_ORDER: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < hidden
    total = tl.zeros([TILE], tl.float32)
    for each in range(num_chosen):
        pair = token * num_chosen + each
        row = pair if IN_ORDER else tl.load(places + pair).to(tl.int64)
        # Rows past the last expert of this rank are whatever the memory held.
        width = tl.where(tl.load(chosen + pair) < num_experts, hidden, 0)
        numbers = tl.load(made + row * hidden + place, mask=place < width, other=0.0).to(tl.float32)
        total += numbers * tl.load(weights + pair).to(tl.float32)
    tl.store(output + token * hidden + place, total, mask=inside)
