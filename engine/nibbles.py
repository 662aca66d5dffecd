"""Weights of four bits as the kernels of a GPU read them.

Inputs lie in units of 128, or of a group where that is less. A unit of one output is half as many bytes: the
first half of its inputs in their lower halves, the other half in their upper ones. So a tile of bytes becomes
two tiles of a matrix product, and no number changes its place:

    levels  [units, out_features, unit / 2]   a unit of neighbouring outputs is one stretch of memory
    grid    [groups, out_features] int32      scale and zero point, which a kernel loads as one

A zero point is what is taken from a level's four bits; it lies in the last five bits of the float32 of the
scale, whose last two millionths are lost for it. Loads of less than four bytes cannot be under way while a
kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from engine.quantized_weight import QuantizedWeight, WeightFormat, unpacked

UNIT = 128
"""Inputs of a unit at most."""

UNITS = (UNIT, UNIT // 2, UNIT // 4)

BASE = 8
"""Added to levels and zero points: both are stored as so much more than they are."""


LAST_BITS = 31
"""Bits of a scale that its zero point takes, 0 to 16."""


@dataclass(frozen=True, slots=True)
class Nibbles:
    """A weight of four bits; see the top of this file."""

    levels: torch.Tensor
    grid: torch.Tensor
    units_per_group: int
    in_features: int


def fits_nibbles(weight: QuantizedWeight) -> bool:
    """Return whether `in_nibbles` takes a weight."""
    is_grouped = weight.scales.shape[1] > 1
    is_whole = weight.zeros is None or torch.equal(weight.zeros, weight.zeros.round().clamp(-8, 8))
    return weight.format is WeightFormat.INT4 and is_whole and not (is_grouped and weight.group % UNITS[-1])


def in_nibbles(weight: QuantizedWeight) -> Nibbles:
    """Return a weight of four bits as kernels read it.

    Raises ValueError for groups that are not of whole units, and for zero points that are not whole."""
    num_groups = weight.scales.shape[1]
    unit = next((unit for unit in UNITS if num_groups == 1 or weight.group % unit == 0), 0)
    if not fits_nibbles(weight):
        raise ValueError(
            f"levels of {weight.format.value} in groups of {weight.group}: four bits are wanted, groups of a "
            f"multiple of {UNITS[-1]} inputs, and zero points that are whole numbers from -8 to 8"
        )
    missing = -weight.in_features % unit
    numbers = pad(unpacked(weight.levels), (0, missing)).add_(8).to(torch.uint8)
    halves = numbers.view(weight.out_features, -1, 2, unit // 2)
    num_units = halves.shape[1]
    return Nibbles(
        levels=(halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous(),
        grid=in_words(weight.scales, weight.zeros).t().contiguous(),
        units_per_group=num_units if num_groups == 1 else weight.group // unit,
        in_features=weight.in_features,
    )


def in_words(scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return each scale and its zero point as one word, int32, of the scales' shape."""
    # Rounded, not cut: half of the bits that the zero point takes are added first.
    words = scales.contiguous().view(torch.int32) + LAST_BITS // 2 & ~LAST_BITS
    return words | (BASE if zeros is None else (zeros + BASE).int())
