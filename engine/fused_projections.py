"""The linear layers of a finished model, changed from outside: fused, and fast for few rows.

q, k and v (and gate and up) read the same hidden states. One product over their stacked weights reads the
input once and fills the device better than three: at batch 1 the k and v projections of an 8B model are 8 MB
each, too little for the memory to get up to speed.

The model's own forward still calls three projections. Each becomes a `Slice` that calls the shared product
and keeps its columns; the calls are identical, so the compiler leaves one (`compiled.py`). Uncompiled, the
product would run three times: what has such names is in a decoder layer, and these are compiled.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import ScalingType, pad, scaled_mm

from engine.kernels.devices import HOPPER, capability
from engine.kernels.nibble_product import MAX_ROWS as MAX_NIBBLE_ROWS
from engine.kernels.nibble_product import can_take_nibbles, nibble_product, written_out_nibbles
from engine.kernels.quantized_product import MAX_ROWS as MAX_QUANTIZED_ROWS
from engine.kernels.quantized_product import levels_product, written_out
from engine.kernels.round_rows import ALIGNED, round_groups, round_rows
from engine.kernels.shared_sums import NARROW, part_counters
from engine.kernels.streamed_product import (
    MAX_THIN_ROWS,
    has_room_for_loads,
    is_rounded_faster,
    rounded_product,
    thin_product,
)
from engine.nibbles import Nibbles, fits_nibbles, in_nibbles
from engine.opaque import opaque
from engine.quantized_linear import QuantizedLinear, quantized_are_alike, stacked_layer
from engine.quantized_weight import block_scales, widened
from engine.shared_product import joined_linear, layers_by_input, linears_are_alike, put_product

WIDE = 100_000
"""Number of columns from which the kernel for few rows beats cuBLAS with more than one row: output heads."""


MAX_UNROUNDED_ROWS = 16
"""Number of rows up to which the kernel for rows as they are is as fast as those for rows of 8-bit floats."""

MAX_READ_ROWS = 64
"""Number of rows that kernels multiply by the levels, where a device has no room for the loads of more."""


class Product(nn.Module):
    """A linear layer that computes its product by what is fastest for its number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.register_buffer("counters", part_counters(weight.device), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = hidden.shape[:-1].numel()
        rows = hidden.reshape(num_rows, hidden.shape[-1])
        output: torch.Tensor = product(rows, self.weight, self.counters)
        output = output.view(*hidden.shape[:-1], self.weight.shape[0])
        return output if self.bias is None else output + self.bias


def _like_rows(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


@opaque(_like_rows)
def product(rows: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight.T. Opaque to the compiler, for which the number of rows has no value."""
    num_rows = rows.shape[0]
    if num_rows == 1 or (num_rows <= MAX_THIN_ROWS and _is_streamed(weight)):
        return thin_product(rows, weight, counters)
    return torch.mm(rows, weight.t())


def _is_streamed(weight: torch.Tensor) -> bool:
    """Return whether the kernel for a few rows beats cuBLAS with this weight."""
    if weight.shape[0] >= WIDE:
        return weight.element_size() == 2 or has_room_for_loads(weight.device)
    return weight.shape[0] <= NARROW and weight.element_size() == 2 and has_room_for_loads(weight.device)


class QuantizedProduct(nn.Module):
    """A `QuantizedLinear` on a GPU, computed by what is fastest for its number of rows."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        weight, self.bias = layer.quantized, layer.bias
        self.is_four_bits = fits_nibbles(weight)
        parts: tuple[torch.Tensor | None, ...]
        if self.is_four_bits:
            nibbles = in_nibbles(weight)
            parts = nibbles.levels, nibbles.grid, None
            self.sizes = nibbles.units_per_group, nibbles.in_features
        else:
            weight = widened(weight)
            zeros = None if weight.zeros is None else weight.zeros.contiguous()
            parts = weight.levels.contiguous(), weight.scales.contiguous(), zeros
            self.group = weight.group
        # torch has products of blocks of 8-bit floats on Hopper alone
        blocks = block_scales(weight) if capability(weight.levels.device) == HOPPER else None
        if blocks is not None:  # cuBLAS wants the scales of an output's blocks in fours
            blocks = pad(blocks, (0, -blocks.shape[1] % ALIGNED))
        for name, part in zip(("levels", "scales", "zeros", "blocks"), (*parts, blocks), strict=True):
            self.register_buffer(name, part, persistent=False)
        self.register_buffer("counters", part_counters(weight.levels.device), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = hidden.shape[:-1].numel()
        rows = hidden.reshape(num_rows, hidden.shape[-1])
        output: torch.Tensor
        if self.is_four_bits:
            output = four_bit_product(rows, self.levels, self.scales, self.counters, *self.sizes)
        else:
            parts = self.levels, self.scales, self.zeros, self.blocks
            output = quantized_product(rows, *parts, self.group, self.counters)
        output = output.view(*hidden.shape[:-1], output.shape[-1])
        return output if self.bias is None else output + self.bias


def _like_nibbles(rows: torch.Tensor, levels: torch.Tensor, *_: object) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], levels.shape[1]))


@opaque(_like_nibbles)
def four_bit_product(
    rows: torch.Tensor,
    levels: torch.Tensor,
    grid: torch.Tensor,
    counters: torch.Tensor,
    units_per_group: int,
    in_features: int,
) -> torch.Tensor:
    """Return rows @ weight.T of a weight of four bits, the fields of `Nibbles`. Opaque, as `product`."""
    weight = Nibbles(levels, grid, units_per_group, in_features)
    if rows.shape[0] <= most_rows(rows.device, MAX_NIBBLE_ROWS) and can_take_nibbles(rows.device, rows.dtype):
        return nibble_product(rows, weight, counters)
    return torch.mm(rows, written_out_nibbles(weight, rows.dtype).t())


@opaque(_like_rows)
def quantized_product(
    rows: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    blocks: torch.Tensor | None,
    group: int,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Return rows @ weight.T of a `QuantizedWeight`. Opaque, as `product`.

    Args:
        blocks: Those of `block_product`, which takes rows of bfloat16."""
    by_channels = levels.dtype == torch.float8_e4m3fn and scales.shape[1] == 1
    if rows.dtype != torch.bfloat16:
        blocks = None
    is_rounded = by_channels or blocks is not None
    most = MAX_UNROUNDED_ROWS if is_rounded else most_rows(rows.device, MAX_QUANTIZED_ROWS)
    if rows.shape[0] <= most:
        return levels_product(rows, levels, scales, zeros, group, counters)
    if blocks is not None:
        return block_product(rows, levels, blocks)
    if by_channels:
        rounded, steps = round_rows(rows)
        if is_rounded_faster(rounded, levels):
            return rounded_product(rounded, steps, levels, scales, counters, rows.dtype)
        return torch._scaled_mm(
            rounded, levels.t(), steps, scales.t(), out_dtype=rows.dtype, use_fast_accum=True
        )
    return torch.mm(rows, written_out(levels, scales, zeros, group, rows.dtype).t())


def most_rows(device: torch.device, most: int) -> int:
    """Return the number of rows up to which kernels multiply by levels, of `most` that they take."""
    return most if has_room_for_loads(device) else MAX_READ_ROWS


def block_product(rows: torch.Tensor, levels: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return rows, rounded to 8-bit floats in groups of 128, by a weight of blocks, [num_rows, out_features].

    Args:
        blocks: `block_scales` of the weight, padded to a multiple of `ALIGNED` in a row."""
    rounded, steps = round_groups(rows)
    output = scaled_mm(
        rounded, levels.t(), steps, ScalingType.BlockWise1x128, blocks.t(), ScalingType.BlockWise128x128,
        output_dtype=rows.dtype,
    )  # fmt: skip
    return output[: rows.shape[0]]


@torch.no_grad()
def use_products(model: nn.Module) -> None:
    """Replace every plain or quantised linear layer by a product, those of one input by slices of one."""
    for found in layers_by_input(model, nn.Linear, linears_are_alike):
        put_product(found, Product(*joined_linear(found.layers)))
    for quantized in layers_by_input(model, QuantizedLinear, quantized_are_alike):
        put_product(quantized, QuantizedProduct(stacked_layer(quantized.layers)))
