"""Products of 8-bit weights on a CPU, in integers.

A row of activations is rounded to 16 bits, which are two planes of 8: its high bytes and its low bytes. Both
are multiplied in one call of oneDNN's product of 8-bit numbers, whose sums are exact, and added. So the one
error is that of the weights, and what a row gives does not depend on the rows beside it. Activations of 8
bits would be sooner done, and would turn the last bit of a float that attention summed in another order into
a whole level: the same prompt in other chunks would then say other things.

oneDNN's is faster than torch's `_int_mm` on large weights and as fast on small ones; `_weight_int8pack_mm`
and `_weight_int4pack_mm_for_cpu` compute in bfloat16, and slower than float32 from a few rows on. Weights of
4 bits are therefore widened to 8. `bench/quantized_cpu.py` measures what is won.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, pad

from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized

PLANE = 256
LARGEST = 127.0 * PLANE
"""Largest 16-bit activation: its high byte, rounded, still has 7 bits and a sign."""

ROUNDING = torch.tensor(1.5 * 2**23 + 0x8080)
"""Added to a float32 below 2 ** 22, leaves it rounded in the lowest bits, each byte 128 more than it was."""

PLANE_BITS = torch.tensor([0, 8], dtype=torch.int32)[:, None, None]

SMALLEST_STEP = torch.tensor(1e-30)


def has_integer_products() -> bool:
    """Return whether this processor multiplies 8-bit numbers without overflow, and oneDNN is there."""
    return torch._C._has_mkldnn and torch.cpu._is_vnni_supported()


class IntegerLinear(nn.Module):
    """A linear layer on a CPU, with weights of 8 bits in oneDNN's layout."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        if weight.format is not WeightFormat.INT8 or weight.scales.shape[1] > 1 or weight.zeros is not None:
            weight = quantized(weight.dequantized(), WeightFormat.INT8)
        self.bias = bias
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._packed = torch.ops.onednn.qlinear_prepack(weight.levels, None)
        self._scales = weight.scales[:, 0].contiguous()
        self._zeros = torch.zeros(weight.out_features, dtype=torch.int32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if not num_rows:
            # As the head of a step that samples nothing.
            return hidden.new_empty((*hidden.shape[:-1], self.out_features))
        steps = torch.add(SMALLEST_STEP, rows.abs().amax(1, keepdim=True), alpha=1 / LARGEST)
        # `addcdiv`, the same bits in one call, takes twice as long where it adds to a single number.
        numbers = torch.div(rows, steps).add_(ROUNDING).view(torch.int32)
        planes = (numbers >> PLANE_BITS).to(torch.uint8).view(2 * num_rows, -1)
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            planes,
            1.0,
            128,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        # In place: writing a second tensor takes a third longer where it is logits.
        output = sums[:num_rows].add_(sums[num_rows:], alpha=PLANE).mul_(steps)
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], self.out_features)


class RoundedLinear(nn.Module):
    """A linear layer on a CPU that computes in float32 what a GPU computes in 8-bit floats.

    Rows are rounded as the products of `torch._scaled_mm` take them: to float8_e4m3fn, with a scale for each
    row, or for each group of inputs where the weight has groups. Weights of integers take rows as they are.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.dequantized(), requires_grad=False)
        self.bias = bias
        self.rounds_rows = True
        self._group = weight.group if weight.format is WeightFormat.FP8 else 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._group and self.rounds_rows:
            hidden = rounded_rows(hidden, self._group)
        return linear(hidden, self.weight, self.bias)


def rounded_rows(hidden: torch.Tensor, group: int) -> torch.Tensor:
    """Return rows as 8-bit floats have them, in their own dtype, with a scale for each `group` of a row."""
    missing = -hidden.shape[-1] % group
    padded = pad(hidden.float(), (0, missing))
    parts = padded.view(*hidden.shape[:-1], padded.shape[-1] // group, group)
    scales = (parts.abs().amax(-1, keepdim=True) / 448.0).clamp_(min=1e-30)
    rounded = (parts / scales).to(torch.float8_e4m3fn).float() * scales
    return rounded.view_as(padded)[..., : hidden.shape[-1]].to(hidden.dtype)
