"""Scales of stacked experts whose weights are levels, and what launchers of their kernels require and derive.

A level is an 8-bit float. A scale belongs to one expert, one output and one group of inputs, as in
`engine/quantized_weight.py`: all inputs are one group, or each 32, 64 or 128 of them. Experts of floats have
no scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

GROUPS = (32, 64, 128)
"""Numbers of inputs that may share a scale, beside all of them."""


class ExpertScales(NamedTuple):
    """Scales of the experts of one layer."""

    gate_up: torch.Tensor
    """[num_experts, 2 * inner, num_groups] float32, contiguous."""
    down: torch.Tensor
    """[num_experts, hidden, num_groups] float32, contiguous."""
    group: int
    """Inputs that share a scale, where there are several groups."""


def require_experts(
    hidden: int, gate_up: torch.Tensor, down: torch.Tensor, scales: ExpertScales | None
) -> None:
    """Raise ValueError for experts of shapes, strides or dtypes that the kernels do not take.

    Args:
        gate_up: [num_experts, 2 * inner, hidden], contiguous.
        down: [num_experts, hidden, inner], contiguous."""
    num_experts, inner = gate_up.shape[0], down.shape[2]
    if gate_up.shape != (num_experts, 2 * inner, hidden) or down.shape != (num_experts, hidden, inner):
        raise ValueError(
            f"experts {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit rows of {hidden}"
        )
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("experts must be contiguous")
    if (gate_up.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"experts of {gate_up.dtype} must have scales exactly where they are levels")
    if scales is not None:
        _require_scales(gate_up, scales.gate_up, scales.group)
        _require_scales(down, scales.down, scales.group)


def _require_scales(levels: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    num_groups, inputs = scales.shape[-1], levels.shape[2]
    if scales.shape[:2] != levels.shape[:2] or not scales.is_contiguous():
        raise ValueError(f"scales {tuple(scales.shape)} do not fit levels {tuple(levels.shape)}")
    if num_groups > 1 and (group not in GROUPS or triton.cdiv(inputs, group) != num_groups):
        raise ValueError(f"{num_groups} groups of {group} do not fit {inputs} inputs")


def launch_groups(scales: ExpertScales | None, step: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return inputs of a group, 0: all, and inputs of a step within one; of gate and up, and of down."""
    if scales is None:
        return (0, step), (0, step)
    groups = [scales.group if each.shape[-1] > 1 else 0 for each in (scales.gate_up, scales.down)]
    gate_up, down = ((group, min(step, group or step)) for group in groups)
    return gate_up, down
