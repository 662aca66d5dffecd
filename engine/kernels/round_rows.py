"""Round rows of activations to 8-bit floats, with a scale for each row or group: launchers and kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.dependent_launch import _await_inputs, _launch_next, overlapping

LARGEST = 448.0
"""Largest float8_e4m3fn."""

GROUP = 128
"""Inputs that share a scale, where rows have one for each group."""

GROUPS = 32
"""Groups that a program rounds."""

ALIGNED = 4
"""Rows, and the scales of an output, come in multiples of this to cuBLAS's product by blocks."""


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


def round_groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels and scales of rows, with a scale for each `GROUP` inputs, as `scaled_mm` takes them.

    Args:
        rows: [num_rows, width], contiguous; width is a multiple of `GROUP`.

    Returns:
        Levels [padded, width] float8_e4m3fn and scales [padded, width / GROUP] float32, which lie group after
        group. Rows are padded to a multiple of `ALIGNED`; what is past the last one is not written.

    Raises ValueError for rows that are not contiguous, and for another width."""
    if rows.dim() != 2 or not rows.is_contiguous() or rows.shape[1] % GROUP:
        raise ValueError(f"rows must be [num_rows, a multiple of {GROUP}], contiguous")
    num_rows, width = rows.shape
    padded = -(-num_rows // ALIGNED) * ALIGNED
    levels = rows.new_empty((padded, width), dtype=torch.float8_e4m3fn)
    scales = rows.new_empty((width // GROUP, padded), dtype=torch.float32)
    if num_rows:
        _round_groups[(num_rows, triton.cdiv(width, GROUPS * GROUP))](
            rows, levels, scales, width, padded,
            LARGEST=LARGEST, GROUPS=GROUPS, GROUP=GROUP, num_warps=8, **overlapping(rows.device),
        )  # fmt: skip
    return levels, scales.t()


@triton.jit
def _round_groups(
    rows,  # [num_rows, width]
    levels,  # [padded, width]
    scales,  # [width / GROUP, padded]
    width,
    padded,
    LARGEST: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _await_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = place < width
    x = tl.load(rows + row * width + place, mask=inside, other=0.0).to(tl.float32)
    _launch_next(OVERLAPS)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, 1e-30)
    tl.store(scales + group * padded.to(tl.int64) + row, scale, mask=group * GROUP < width)
    tl.store(levels + row * width + place, (x / scale[:, None]).to(levels.dtype.element_ty), mask=inside)


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
