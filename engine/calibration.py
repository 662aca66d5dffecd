"""Calibration: a model's layers are rounded one after the other, each for what a text brings to it.

The text, `calibration.txt`, is of many kinds, because a weight is fitted to the inputs that it meets. It is
part of the program, so that every node of a cluster rounds to the same levels. Nothing is measured with it.

One pass over the text does it. Each decoder layer runs with its floats while the second moments of what its
linear layers take in are summed, and then these are rounded; so the moments of one layer are in memory at a
time. What a layer gives the next is that of its floats. Running it again with its levels, so that the next is
fitted to what it will be given, made it worse: errors of the first token, which all others attend to, add up.
Experts have the nearest levels: few of a text's tokens reach each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.compensated_rounding import compensated
from engine.device_weights import visiting
from engine.pipeline import plain_layers
from engine.quantized_linear import linears_in, nearest_on, quantize_linears
from engine.quantized_weight import QuantizedWeight, WeightFormat, quantized

TEXT = Path(__file__).with_name("calibration.txt")

ROW_TOKENS = 256
"""Tokens that see each other."""


@torch.no_grad()
def quantize_for_text(
    model: PreTrainedModel,
    weight_format: WeightFormat,
    head: nn.Module | None,
    token_ids: list[int],
    device: torch.device | None = None,
) -> None:
    """Replace the linear layers of a finished model, in place, by levels that fit a text.

    A family without plain `layers`, and what is outside of them, is rounded to the nearest levels, and so is
    everything where there are no tokens. `device` computes; None: the model's own, of a model on the host
    it has one layer at a time.

    Raises ConfigError as `quantize_linears`."""
    device = device or model.device
    layers = list(plain_layers(model)) if token_ids else []
    with ExitStack() as hooks:
        for layer in layers:
            seen: dict[nn.Module, torch.Tensor] = {}
            for _, _, linear in linears_in(layer):
                hooks.enter_context(linear.register_forward_pre_hook(partial(_add_moments, seen)))
            hooks.enter_context(layer.register_forward_hook(_rounding(weight_format, seen)))
        if layers:
            # Entered last, so that a layer is rounded before it leaves the device.
            with visiting(model, device):
                _read(model, token_ids, device)
    quantize_linears(model, weight_format, head, partial(nearest_on, device), device)


def _read(model: PreTrainedModel, token_ids: list[int], device: torch.device) -> None:
    size = min(ROW_TOKENS, len(token_ids))
    rows = torch.tensor(token_ids[: len(token_ids) // size * size], device=device).view(-1, size)
    model(input_ids=rows, use_cache=False, logits_to_keep=1)


def _add_moments(seen: dict[nn.Module, torch.Tensor], linear: nn.Module, inputs: tuple[Any, ...]) -> None:
    rows: torch.Tensor = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
    moments = rows.t() @ rows
    seen[linear] = seen[linear] + moments if linear in seen else moments


def _rounding(weight_format: WeightFormat, seen: dict[nn.Module, torch.Tensor]) -> Callable[..., Any]:
    """Return a hook that rounds a layer once it has run."""

    def fitted(linear: nn.Linear, kind: WeightFormat) -> QuantizedWeight:
        weight, moments = linear.weight.detach(), seen.pop(linear, None)
        return quantized(weight, kind) if moments is None else compensated(weight, kind, moments)

    def after(layer: nn.Module, _: object, __: object) -> None:
        quantize_linears(layer, weight_format, rounding=fitted)

    return after
