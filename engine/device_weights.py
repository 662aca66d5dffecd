"""Weights on their device: moved there for good, or each layer for as long as it computes.

Loaded weights are a map of their files: what is not touched is not read. So a rank cuts its share on the host
and moves that alone, and a model may be larger than one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from engine.load_progress import LoadProgress
from engine.pipeline import plain_layers
from engine.quantized_linear import QuantizedLinear
from engine.shared_product import layers_by_input, linears_are_alike

COPIES = 8
"""Modules that are copied at once: each copy from a file waits for its pages."""


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move a model's weights to a device, in place, with progress in the log."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # threads have their own
    parts = {each: size for each in module.modules() if (size := _bytes_elsewhere(each, device))}
    progress = LoadProgress("weights move", sum(parts.values()))
    together = [found.layers for found in layers_by_input(module, nn.Linear, linears_are_alike)]
    with ThreadPoolExecutor(COPIES, "weights") as pool:
        moves = {}
        for layers in together:
            # one that has several names is moved once
            if len(parts.keys() & set(layers)) == len(layers) > 1:
                moves[pool.submit(_move_together, layers, device)] = sum(map(parts.pop, layers))
        moves |= {pool.submit(_move, part, device): size for part, size in parts.items()}
        for move in as_completed(moves):
            move.result()
            progress.add(moves[move])


@contextmanager
def visiting(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Let each decoder layer of a model on the host compute on a device, and lie on the host otherwise.

    What is outside of the layers moves there for good, as does all of a family without plain layers. Levels
    that a layer is rounded to while it is there come back to the host. On the device already: no effect."""
    layers = [
        each for each in plain_layers(model) if any(_bytes_elsewhere(part, device) for part in each.modules())
    ]
    inside = {each for layer in layers for each in layer.modules()}
    for each in model.modules():
        if each not in inside:
            _move(each, device)
    with ExitStack() as hooks:
        for layer in layers:
            visit = _Visit(device)
            hooks.enter_context(layer.register_forward_pre_hook(visit.begin, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(visit.end))
        yield


class _Visit:
    """One layer's way to a device and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for module in layer.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in tables:
                self._home += [(held, name, each) for name, each in held.items() if each is not None]
            if isinstance(module, QuantizedLinear):
                module.quantized = module.quantized.on(self._device)
        for held, name, tensor in self._home:
            there = tensor.detach().to(self._device)
            is_parameter = isinstance(tensor, nn.Parameter)
            held[name] = nn.Parameter(there, requires_grad=False) if is_parameter else there
        return tree_map(self._brought, (args, kwargs))  # type: ignore[no-any-return]

    def end(self, layer: nn.Module, _: object, __: object) -> None:
        while self._home:
            held, name, tensor = self._home.pop()
            held[name] = tensor
        for module in layer.modules():  # levels that were made there
            _move(module, torch.device("cpu"))

    def _brought(self, each: Any) -> Any:
        return each.to(self._device) if isinstance(each, torch.Tensor) else each


def _move(part: nn.Module, device: torch.device) -> None:
    part._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _move_together(layers: list[nn.Linear], device: torch.device) -> None:
    """Move layers of one input so that their weights lie one behind the other, as one product reads them."""
    for name in ("weight", "bias"):
        tensors = [getattr(layer, name) for layer in layers]
        if tensors[0] is None:
            continue
        sizes = [len(tensor) for tensor in tensors]
        whole = tensors[0].new_empty((sum(sizes), *tensors[0].shape[1:]), device=device)
        for layer, tensor, place in zip(layers, tensors, whole.split(sizes), strict=True):
            setattr(layer, name, nn.Parameter(place.copy_(tensor), requires_grad=False))


def _bytes_elsewhere(part: nn.Module, device: torch.device) -> int:
    """Return the bytes that a module itself has somewhere else."""
    tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    if isinstance(part, QuantizedLinear):
        tensors += part.quantized.tensors()
    return sum(each.numel() * each.element_size() for each in tensors if each.device.type != device.type)
