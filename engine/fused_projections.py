"""Fuse projections of the same input into one matrix product, from outside a finished model.

q, k and v (and gate and up) read the same hidden states. One product over their stacked
weights reads the input once and fills the device better than three: at batch 1 the k and
v projections of an 8B model are 8 MB each, too little for the memory to get up to speed.

The model's own forward still calls three projections. Each becomes a `Slice` that calls
the shared product and keeps its columns; the calls are identical, so the compiler's
elimination of common subexpressions leaves one. Uncompiled, the product would run three
times: fuse only what is compiled.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that the families of transformers give to projections of one input."""


class Slice(nn.Module):
    """Columns `start` to `end` of a product that other slices share."""

    def __init__(self, product: nn.Linear, start: int, end: int) -> None:
        super().__init__()
        self.product = product
        self.start = start
        self.end = end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.product(hidden)[..., self.start : self.end]
        return columns


def fuse_projections(model: nn.Module) -> int:
    """Replace each group of plain `nn.Linear` siblings by slices of one product.

    Returns:
        How many groups were fused. What is not plain, or does not fit, stays as it was.
    """
    fused = 0
    for module in list(model.modules()):
        for names in GROUPS:
            parts = [module.get_submodule(name) for name in names if name in module._modules]
            if len(parts) == len(names) and _can_fuse(parts):
                _fuse(module, names, [part for part in parts if isinstance(part, nn.Linear)])
                fused += 1
    return fused


def _can_fuse(parts: list[nn.Module]) -> bool:
    linears = [part for part in parts if type(part) is nn.Linear]
    same_kind = {(part.in_features, part.bias is None, part.weight.dtype) for part in linears}
    return len(linears) == len(parts) and len(same_kind) == 1


@torch.no_grad()
def _fuse(module: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    product = nn.Linear(1, 1, bias=parts[0].bias is not None, device="meta")
    product.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    product.in_features, product.out_features = product.weight.shape[1], product.weight.shape[0]
    if parts[0].bias is not None:
        product.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    ends = itertools.accumulate(part.out_features for part in parts)
    for name, part, end in zip(names, parts, ends, strict=True):
        module._modules[name] = Slice(product, end - part.out_features, end)
