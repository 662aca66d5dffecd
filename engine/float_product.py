"""Products of weights of 8-bit floats on a CPU, in float32, of rows that are rounded as a GPU rounds them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, pad

from engine.quantized_weight import QuantizedWeight


class RoundedLinear(nn.Module):
    """A linear layer on a CPU that computes in float32 what a GPU computes in 8-bit floats.

    Rows are rounded as the products of `torch._scaled_mm` take them: to float8_e4m3fn, with a scale for each
    row, or for each group of inputs where the weight has groups.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.dequantized(), requires_grad=False)
        self.bias = bias
        self.rounds_rows = True
        self._group = weight.group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.rounds_rows:
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
