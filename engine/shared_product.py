"""Linear layers of one input, computed as one product over their stacked weights.

A call of a product costs some tens of microseconds beside its arithmetic, and narrow weights, as those of K
and V, fill a processor badly. The model's own forward still calls each layer, which takes its columns of the
product. On a CPU the first call computes it; on a GPU the compiler leaves one of the calls
(`fused_projections.py`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that the families of transformers give to projections of one input."""


L = TypeVar("L", bound=nn.Module)


class LayersOfInput(NamedTuple, Generic[L]):
    """Layers of a model that one product can compute, or a lone one."""

    parent: nn.Module
    names: tuple[str, ...]
    """Names of the layers in the parent."""
    layers: list[L]


def layers_by_input(
    model: nn.Module, kind: type[L], are_alike: Callable[[list[L]], bool]
) -> Iterator[LayersOfInput[L]]:
    """Yield the layers of a model that are of exactly one kind; those of one input together, if alike.

    Each may be replaced once it is yielded, and is let go of."""
    found: deque[LayersOfInput[L]] = deque()
    for parent in model.modules():
        # Exactly: a subclass may compute something else.
        children = {name: child for name, child in parent._modules.items() if type(child) is kind}
        for names in SHARED_INPUTS:
            layers = [children[name] for name in names if name in children]
            if len(layers) == len(names) and are_alike(layers):
                found.append(LayersOfInput(parent, names, [children.pop(name) for name in names]))
        found += [LayersOfInput(parent, (name,), [child]) for name, child in children.items()]
    while found:
        yield found.popleft()


def linears_are_alike(layers: list[nn.Linear]) -> bool:
    """Return whether the weights and biases of plain layers can be stacked."""
    return len({(each.in_features, each.bias is None, each.weight.dtype) for each in layers}) == 1


class SharedProduct(nn.Module):
    """Layers of one input as one product, computed when the first of them is called with an input.

    Its result is kept until each of the others has had its columns of it."""

    def __init__(self, product: nn.Module, num_slices: int) -> None:
        super().__init__()
        self.product = product
        self._num_slices = num_slices
        self._hidden: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._num_left = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the product of `hidden`, which nobody writes to until all slices have had theirs."""
        if self._output is None or self._hidden is not hidden:
            self._hidden, self._output, self._num_left = hidden, self.product(hidden), self._num_slices
        output = self._output
        self._num_left -= 1
        if not self._num_left:
            self._hidden = self._output = None
        return output


class Slice(nn.Module):
    """Columns `start` to `end` of a product that other slices share."""

    def __init__(self, product: nn.Module, start: int, end: int) -> None:
        super().__init__()
        self.product = product
        self.start = start
        self.end = end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.product(hidden)[..., self.start : self.end]
        return columns


def share_product(found: LayersOfInput[L], product: nn.Module) -> None:
    """Put `product` in the place of the layers that it computes, to be called once for all of them."""
    num_slices = len(found.layers)
    put_product(found, SharedProduct(product, num_slices) if num_slices > 1 else product)


def put_product(found: LayersOfInput[L], product: nn.Module) -> None:
    """Put `product` in the place of a lone layer, or slices of it in those of several."""
    if len(found.layers) == 1:
        setattr(found.parent, found.names[0], product)
        return
    sizes: list[Any] = [layer.out_features for layer in found.layers]
    for name, size, end in zip(found.names, sizes, itertools.accumulate(sizes), strict=True):
        setattr(found.parent, name, Slice(product, end - size, end))


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return a layer of this weight and bias, which are not copied."""
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def joined_linear(layers: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight and the bias of plain layers of one input as one layer would have them."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    weight = nn.Parameter(_joined([layer.weight for layer in layers]), requires_grad=False)
    return weight, nn.Parameter(_joined(biases), requires_grad=False) if biases else None


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors one behind the other; no copy if they lie so (`device_weights.py`)."""
    first, at = parts[0], parts[0].storage_offset()
    for part in parts:
        lies_there = part.untyped_storage() is first.untyped_storage() and part.storage_offset() == at
        if not (lies_there and part.is_contiguous()):
            return torch.cat(parts)
        at += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
