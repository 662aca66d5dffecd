"""Levels and scales of stacked experts: what their kernels read, and what launchers require and derive.

A level is an 8-bit float or integer, or one of two in a byte, as in `engine/quantized_weight.py`. A scale
belongs to one expert, one output and one group of inputs: all inputs are one group, or each 32, 64 or 128 of
them. Of four bits it is a word with a zero point (`engine/nibbles.py`), which each step of a loop reads.
Experts of floats have no scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.nibble_product import _scale_and_zero
from engine.quantized_weight import GROUPS

LEVELS = (torch.float8_e4m3fn, torch.int8, torch.uint8)
"""Dtypes of levels; of the last, two lie in each."""


class ExpertScales(NamedTuple):
    """Scales of the experts of one layer."""

    gate_up: torch.Tensor
    """[num_experts, 2 * inner, num_groups] float32, of four bits int32, contiguous."""
    down: torch.Tensor
    """[num_experts, hidden, num_groups], as those of gate and up."""
    group: int
    """Inputs that share a scale, where there are several groups."""


def inputs_of(weight: torch.Tensor) -> int:
    """Return the number of inputs of experts' floats or levels."""
    return weight.shape[2] * (2 if weight.dtype == torch.uint8 else 1)


def require_experts(
    hidden: int, gate_up: torch.Tensor, down: torch.Tensor, scales: ExpertScales | None
) -> None:
    """Raise ValueError for experts of shapes, strides or dtypes that the kernels do not take.

    Args:
        gate_up: [num_experts, 2 * inner, hidden], contiguous; of four bits, half as many bytes.
        down: [num_experts, hidden, inner], contiguous; as `gate_up`."""
    num_experts, inner = gate_up.shape[0], inputs_of(down)
    are_shaped = gate_up.shape[:2] == (num_experts, 2 * inner) and down.shape[:2] == (num_experts, hidden)
    if not are_shaped or inputs_of(gate_up) != hidden:
        raise ValueError(
            f"experts {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit rows of {hidden}"
        )
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("experts must be contiguous")
    if (gate_up.dtype in LEVELS) != (scales is not None) or gate_up.dtype != down.dtype:
        raise ValueError(f"experts of {gate_up.dtype} and {down.dtype} must be alike, and levels have scales")
    if scales is not None:
        _require_scales(gate_up, scales.gate_up, scales.group)
        _require_scales(down, scales.down, scales.group)


def _require_scales(levels: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    num_groups, inputs = scales.shape[-1], inputs_of(levels)
    if scales.shape[:2] != levels.shape[:2] or not scales.is_contiguous():
        raise ValueError(f"scales {tuple(scales.shape)} do not fit levels {tuple(levels.shape)}")
    if (scales.dtype == torch.int32) != (levels.dtype == torch.uint8):
        raise ValueError(f"scales of {scales.dtype} do not fit levels of {levels.dtype}")
    if num_groups > 1 and (group not in GROUPS or triton.cdiv(inputs, group) != num_groups):
        raise ValueError(f"{num_groups} groups of {group} do not fit {inputs} inputs")


def launch_groups(
    scales: ExpertScales | None, hidden: int, inner: int, step: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return inputs of a group, 0: all, and inputs of a step within one; of gate and up, and of down.

    Of four bits a group of all inputs has their number, or the next power of two: its zero point is read with
    the levels."""
    if scales is None:
        return (0, step), (0, step)
    groups = []
    for each, inputs in ((scales.gate_up, hidden), (scales.down, inner)):
        all_inputs = max(GROUPS[0], triton.next_power_of_2(inputs)) if each.dtype == torch.int32 else 0
        groups.append(scales.group if each.shape[-1] > 1 else all_inputs)
    gate_up, down = ((group, min(step, group or step)) for group in groups)
    return gate_up, down


@triton.jit
def _weights(row, is_row, begin, inputs, STEP: tl.constexpr):
    """Return floats or levels `begin` to `begin + STEP` of rows [ROWS] that begin at pointers, [ROWS, STEP].

    Past the last input they are anything; of four bits they are 8 more than the level."""
    if row.dtype.element_ty == tl.uint8:
        place = begin // 2 + tl.arange(0, STEP // 2)
        mask = is_row[:, None] & (place < inputs // 2)[None, :]
        pairs = tl.load(row[:, None] + place[None, :], mask=mask, other=0)
        return tl.interleave(pairs & 15, pairs >> 4)
    else:  # noqa: RET505 the compiler wants both
        place = begin + tl.arange(0, STEP)
        mask = is_row[:, None] & (place < inputs)[None, :]
        return tl.load(row[:, None] + place[None, :], mask=mask, other=0.0)


@triton.jit
def _scales_and_zeros(scales):
    """Return scales and zero points, float32, of what lies in `ExpertScales`."""
    if scales.dtype == tl.int32:
        return _scale_and_zero(scales)
    else:  # noqa: RET505 the compiler wants both
        return scales, tl.zeros_like(scales)


@triton.jit
def _row_pointers(weights, row, inputs):
    """Return pointers to rows of stacked weights."""
    if weights.dtype.element_ty == tl.uint8:
        return weights + row * (inputs // 2)
    else:  # noqa: RET505 the compiler wants both
        return weights + row * inputs
