"""Linear layers on a CPU with weights laid out for small batches.

A decode step of a few sequences multiplies a few rows with every weight of the model. torch's plain product
reads the weights at a third of the memory's rate; oneDNN's, over weights that it laid out itself, at nearly
all of it. SmolLM2's largest product (576 x 49,152), one thread of a 2.5 GHz Xeon, 2026-11-21:

    rows            1      4      8      16     64
    plain, ms     12.0   43.8   44.8   27.7   59.4
    packed, ms    12.4   12.4   16.0   18.9   45.9

One row is faster plain (by a fifth in the smaller layers), so both layouts are kept: a model takes twice its
memory, which on a CPU is cheap. Layers of one input are one product (`engine/shared_product.py`), which is
large enough to be as fast packed for one row, and is kept packed alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from engine.load_progress import LoadProgress
from engine.shared_product import joined_linear, layers_by_input, linears_are_alike, share_product

MIN_WEIGHTS = 1 << 18
"""Smaller layers lose more by the call, some 40 us, than they win."""

ROWS_HINT = 64
"""Any number above 1 gives the same layout."""


class PackedLinear(nn.Module):
    """Computes what the linear layer that it is made from computes.

    Args:
        weight: [out_features, in_features]
        is_plain_kept: Whether a single row is multiplied with the weight as it is.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_plain_kept: bool = True) -> None:
        super().__init__()
        self.out_features = len(weight)
        self.weight = weight if is_plain_kept else None
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.weight is not None and rows.numel() == rows.shape[-1]:
            return linear(rows, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product


@torch.no_grad()
def pack_linears(model: nn.Module) -> None:
    """Replace the large linear layers of a finished float32 model on a CPU, in place."""
    if not torch._C._has_mkldnn:
        return
    sizes = [4 * each.weight.numel() for each in model.modules() if type(each) is nn.Linear]
    progress = LoadProgress("weights are laid out", sum(sizes))
    for found in layers_by_input(model, nn.Linear, linears_are_alike):
        num_weights = sum(layer.weight.numel() for layer in found.layers)
        if num_weights >= MIN_WEIGHTS:
            joined = joined_linear(found.layers)
            share_product(found, PackedLinear(*joined, is_plain_kept=len(found.layers) == 1))
        progress.add(4 * num_weights)
