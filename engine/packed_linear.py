"""Linear layers on a CPU with weights laid out for small batches.

A decode step of a few sequences multiplies a few rows with every weight of the model. torch's plain product
reads the weights at a third of the memory's rate; oneDNN's, over weights that it laid out itself, at nearly
all of it. SmolLM2's largest product (576 x 49,152), one thread of a 2.5 GHz Xeon, 2026-11-21:

    rows            1      4      8      16     64
    plain, ms     12.0   43.8   44.8   27.7   59.4
    packed, ms    12.4   12.4   16.0   18.9   45.9

One row is faster plain (by a fifth in the smaller layers), so both layouts are kept: a model takes twice its
memory, which on a CPU is cheap.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

MIN_WEIGHTS = 1 << 18
"""Smaller layers lose more by the call, some 40 us, than they win."""

ROWS_HINT = 64
"""Any number above 1 gives the same layout."""


class PackedLinear(nn.Module):
    """Computes what the linear layer that it is made from computes."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), ROWS_HINT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == rows.shape[-1]:
            return linear(rows, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product


def pack_linears(model: nn.Module) -> None:
    """Replace the large linear layers of a finished float32 model on a CPU, in place."""
    if not torch._C._has_mkldnn:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Exactly nn.Linear: a subclass may compute something else.
            if type(child) is nn.Linear and child.weight.numel() >= MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))
