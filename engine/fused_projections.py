"""The linear layers of a finished model, changed from outside: fused, and fast for few rows.

q, k and v (and gate and up) read the same hidden states. One product over their stacked weights reads the
input once and fills the device better than three: at batch 1 the k and v projections of an 8B model are 8 MB
each, too little for the memory to get up to speed.

The model's own forward still calls three projections. Each becomes a `Slice` that calls the shared product
and keeps its columns; the calls are identical, so the compiler leaves one (`compiled.py`). Uncompiled, the
product would run three times: fuse only what is compiled.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from engine.kernels.thin_product import MAX_ROWS, thin_product

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that the families of transformers give to projections of one input."""

LAST_GROUPS = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The same for a last layer that computes K and V of more tokens than anything else."""

WIDE = 100_000
"""Number of columns from which the kernel for few rows beats cuBLAS with more than one row: output heads."""


class Product(nn.Module):
    """A linear layer that computes its product by what is fastest for its number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        num_rows = hidden.shape[:-1].numel()
        output: torch.Tensor = product(hidden.reshape(num_rows, hidden.shape[-1]), self.weight)
        output = output.view(*hidden.shape[:-1], self.weight.shape[0])
        return output if self.bias is None else output + self.bias


@torch.library.custom_op("conductor::product", mutates_args=())
def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight.T. Opaque to the compiler, for which the number of rows has no value."""
    num_rows, num_columns = rows.shape[0], weight.shape[0]
    if num_rows == 1 or (num_rows <= MAX_ROWS and num_columns >= WIDE):
        return thin_product(rows, weight)
    return torch.mm(rows, weight.t())


@product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


class Slice(nn.Module):
    """Columns `start` to `end` of a product that other slices share."""

    def __init__(self, product: Product, start: int, end: int) -> None:
        super().__init__()
        self.product = product
        self.start = start
        self.end = end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.product(hidden)[..., self.start : self.end]
        return columns


def fuse_projections(layers: nn.Module, groups: tuple[tuple[str, ...], ...] = GROUPS) -> int:
    """Replace linear layers inside of `layers` that read the same input by slices of one product.

    Returns how many groups were fused. Other modules than plain `nn.Linear` stay as they were.
    """
    fused = 0
    for module in list(layers.modules()):
        for names in groups:
            parts = [module._modules.get(name) for name in names]
            linears = [part for part in parts if type(part) is nn.Linear]
            kinds = {(part.in_features, part.bias is None, part.weight.dtype) for part in linears}
            if len(linears) == len(names) and len(kinds) == 1:
                _stack(module, names, linears)
                fused += 1
    return fused


def use_products(root: nn.Module) -> None:
    """Replace every plain `nn.Linear` below `root` by a `Product` of the same parameters."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                module._modules[name] = Product(child.weight, child.bias)


@torch.no_grad()
def _stack(module: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
    weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    product = Product(weight, bias)
    ends = itertools.accumulate(part.out_features for part in parts)
    for name, part, end in zip(names, parts, ends, strict=True):
        module._modules[name] = Slice(product, end - part.out_features, end)
