"""Linear layers whose weights have few bits: which layers have them, and what each device makes of them.

A `QuantizedLinear` stands where the model's `nn.Linear` stood, from loading on. It is cut among ranks and
stacked with others like it, and at last becomes what multiplies fastest: on a CPU a `RoundedLinear` or
`engine/integer_product.py`. Until then it computes with the weight written out.

The decoder's layers take the format that was asked for, but for those that bear it least. Of four bits, the
projections to queries, keys and values have 8-bit integers: they are a tenth of the weights, and would bring
a third of the error. So has the output head, whose products are the logits; of 8-bit floats it stays as it
is. Embeddings are looked up, not multiplied; a head that is tied to them gets levels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import torch
from torch import nn
from torch.nn.functional import linear, pad

from base.errors import ConfigError
from engine.load_progress import LoadProgress
from engine.quantized_experts import quantize_experts, require_plain_experts
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized, stacked
from engine.shared_product import SHARED_INPUTS, layers_by_input, share_product

HEAD_FORMATS = {WeightFormat.INT8: WeightFormat.INT8, WeightFormat.INT4: WeightFormat.INT8}
"""Format of the output head; without one, floats."""

READ_OTHERWISE = ("kv_b_proj",)
"""Names of layers whose weight is no mere factor: `engine/latent_attention.py` multiplies queries by it."""


class QuantizedLinear(nn.Module):
    """A linear layer with a weight of few bits; belongs to a model that is being made ready.

    Attributes:
        rounds_rows: Whether activations are rounded to 8-bit floats where the weight has these.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.quantized = weight
        self.bias = bias
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.rounds_rows = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the weight with the parameters; levels keep their dtype."""
        self.quantized = self.quantized.on(fn(torch.empty(0, device=self.quantized.levels.device)).device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.rounds_rows and self.quantized.format is WeightFormat.FP8:
            hidden = rounded_rows(hidden, self.quantized.group)
        return linear(hidden, self.quantized.dequantized(hidden.dtype), self.bias)


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


@contextmanager
def unrounded_rows(model: nn.Module) -> Iterator[None]:
    """Let no activation be rounded to 8-bit floats in the body."""
    layers = [each for each in model.modules() if isinstance(each, QuantizedLinear | RoundedLinear)]
    for layer in layers:
        layer.rounds_rows = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_rows = True


Rounding = Callable[[nn.Linear, WeightFormat], QuantizedWeight]
"""How the weight of a layer becomes levels of a format."""


def quantize_linears(
    model: nn.Module,
    weight_format: WeightFormat,
    head: nn.Module | None = None,
    rounding: Rounding | None = None,
    device: torch.device | None = None,
) -> None:
    """Replace the linear layers and the experts of a finished model, or of a part of one, in place.

    Args:
        head: The output head among them.
        rounding: Of linear layers; None: the nearest levels, which experts have anyway.
        device: What computes the levels of experts; None: what has their floats.

    Raises ConfigError for a model with weights that cannot have levels of the format."""
    require_plain_experts(model)
    rounded = rounding or partial(nearest_on, None)
    for parent, name, layer in linears_in(model):
        kind = HEAD_FORMATS.get(weight_format) if layer is head else _format_of(name, weight_format)
        if kind is None:
            continue
        try:
            weight = rounded(layer, kind)
        except ValueError as error:
            raise ConfigError(f"quantization: {name}: {error}") from error
        setattr(parent, name, QuantizedLinear(weight, layer.bias))
    quantize_experts(model, weight_format, device)


def linears_in(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers that may have few bits, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Exactly nn.Linear: a subclass may compute something else.
        if type(child) is nn.Linear and name not in READ_OTHERWISE
    ]


def _format_of(name: str, weight_format: WeightFormat) -> WeightFormat:
    is_sensitive = weight_format is WeightFormat.INT4 and name in SHARED_INPUTS[0]
    return WeightFormat.INT8 if is_sensitive else weight_format


def nearest_on(device: torch.device | None, layer: nn.Linear, kind: WeightFormat) -> QuantizedWeight:
    """Return a layer's weight in the nearest levels, where it lies; `device` computes them, None: its own."""
    weight = layer.weight.detach()
    return quantized(weight if device is None else weight.to(device), kind).on(weight.device)


def use_cpu_products(model: nn.Module) -> None:
    """Replace every `QuantizedLinear` of a finished model by what computes it on this processor, in place."""
    sizes = [each.quantized.num_bytes for each in model.modules() if type(each) is QuantizedLinear]
    progress = LoadProgress("levels are laid out", sum(sizes))
    for found in layers_by_input(model, QuantizedLinear, quantized_are_alike):
        share_product(found, _cpu_product(stacked_layer(found.layers)))
        progress.add(sum(layer.quantized.num_bytes for layer in found.layers))


def quantized_are_alike(layers: list[QuantizedLinear]) -> bool:
    """Return whether `stacked_layer` takes these layers."""
    weights = [layer.quantized for layer in layers]
    kinds = {(each.format, each.in_features, each.group, each.levels.device) for each in weights}
    return len(kinds) == len({each.zeros is None for each in weights}) == 1


def stacked_layer(layers: list[QuantizedLinear]) -> QuantizedLinear:
    """Return layers of one input, alike in format and in having a bias, as one."""
    if len(layers) == 1:
        return layers[0]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(layers) else None
    return QuantizedLinear(stacked([layer.quantized for layer in layers]), bias)


def _cpu_product(layer: QuantizedLinear) -> nn.Module:
    if layer.quantized.format is WeightFormat.FP8:
        return RoundedLinear(layer.quantized, layer.bias)
    # Takes seconds with numba and what it compiles, which only layers of integers need.
    from engine.integer_product import IntegerLinear  # noqa: PLC0415

    return IntegerLinear(layer.quantized, layer.bias)
