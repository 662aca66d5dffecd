"""Round rows of activations to 8-bit floats, each with a scale of its own: launcher and kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping

LARGEST = 448.0
"""Largest float8_e4m3fn."""


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels [num_rows, width] float8_e4m3fn and scales [num_rows, 1] float32.

    Args:
        rows: [num_rows, width], contiguous.

    Raises ValueError for rows that are not contiguous."""
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError("rows must be [num_rows, width], contiguous")
    num_rows, width = rows.shape
    levels = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    if num_rows:
        _round_row[(num_rows,)](
            rows, levels, scales, width,
            LARGEST=LARGEST, WIDTH_PAD=triton.next_power_of_2(width), num_warps=8, **overlapping(rows.device),
        )  # fmt: skip
    return levels, scales


@triton.jit
def _round_row(
    rows,  # [num_rows, width]
    levels,  # [num_rows, width]
    scales,  # [num_rows]
    width,
    LARGEST: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH_PAD)
    inside = place < width
    x = tl.load(rows + row * width + place, mask=inside, other=0.0).to(tl.float32)
    _launch_next(OVERLAPS)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, 1e-30)
    tl.store(scales + row, scale)
    tl.store(levels + row * width + place, (x / scale).to(levels.dtype.element_ty), mask=inside)
