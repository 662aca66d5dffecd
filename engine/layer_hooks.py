"""Layer hooks: what is done between the layers of a step that is queued on a GPU.

A long chunk's first layers are done long before its last, and their KV can leave meanwhile. So after each
group of layers an event is recorded on the device's stream. And a prefix that is still being loaded comes
layer by layer (`arrivals.py`): before each layer, its part is waited for. Both happen outside of what is
compiled: the layers in the model's list are wrapped. A step that runs as CUDA graphs is queued when all
of its prefixes are there (`gpu_runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import nn

from engine.arrivals import PrefixArrivals
from engine.step import LayerGroup

Mark = Callable[[], Callable[[], None]]
"""Marks the place reached on the device's stream; returns what blocks until it is passed."""


def mark_on_stream() -> Callable[[], None]:
    """Mark the current stream of the current GPU."""
    # Whoever waits sleeps: spinning would take a core from the event loop.
    reached = torch.Event("cuda", blocking=True)
    reached.record()
    return reached.synchronize


class LayerHooks:
    """Owns what is done between one model's layers. Belongs to the device thread."""

    def __init__(self, layers: nn.ModuleList, num_groups: int, mark: Mark = mark_on_stream) -> None:
        """Replace each of a model's layers by a wrapper of it; groups are as equal as can be, none empty."""
        self.num_layers = len(layers)
        num_groups = min(num_groups, self.num_layers)
        self._ends = {self.num_layers * (group + 1) // num_groups for group in range(num_groups)}
        self._usual_mark = self._mark = mark
        self._arrivals: list[PrefixArrivals] = []
        self._groups: list[LayerGroup] | None = None
        kinds = [_kind_of(layer) for layer in layers]
        self._watched: list[_Watched] = []
        for index, layer in enumerate(layers):
            watched = _Watched(layer, partial(self._before, index), partial(self._after, index))
            watched.repeats = kinds[index] in kinds[:index] and index + 1 < self.num_layers
            self._watched.append(watched)
            layers[index] = watched

    def begin(self, arrivals: list[PrefixArrivals] | None = None, mark: Mark | None = None) -> None:
        """Mark the groups of the step that is queued from here on, which reads these loads.

        Args:
            mark: Marks them, of this step alone; one that is captured begins its next graph there. None: what
                this was made with.
        """
        self._groups = []
        self._arrivals = arrivals or []
        self._mark = mark or self._usual_mark

    def end(self) -> tuple[LayerGroup, ...]:
        """Return the groups of the step that `begin` was called for."""
        groups, self._groups = self._groups or [], None
        self._arrivals = []
        return tuple(groups)

    @contextmanager
    def waiting_for(self, arrivals: list[PrefixArrivals]) -> Iterator[None]:
        """Wait before each layer of what the body computes or queues, and mark no groups."""
        self._arrivals = arrivals
        try:
            yield
        finally:
            self._arrivals = []

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Run, in the body, the first layer of each kind and the last: who compiles or warms needs no more.

        The others pass on what they are given. They must have run before."""
        skipped = [watched for watched in self._watched if watched.repeats and watched.gives_hidden]
        for watched in skipped:
            watched.is_skipped = True
        try:
            yield
        finally:
            for watched in skipped:
                watched.is_skipped = False

    def _before(self, index: int) -> None:
        for arrivals in self._arrivals:
            arrivals.wait(index + 1)

    def _after(self, index: int) -> None:
        end = index + 1
        if self._groups is not None and end in self._ends:
            first = self._groups[-1].first + self._groups[-1].count if self._groups else 0
            self._groups.append(LayerGroup(first, end - first, self._mark()))


class _Watched(nn.Module):
    """A layer, and calls before and after it. In all else it is the layer."""

    def __init__(self, layer: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()
        self.layer = layer
        self._before = before
        self._after = after
        self.repeats = False
        """Whether a layer before it is of its kind, and it is not the last."""
        self.gives_hidden = False
        """Whether it was last given hidden states first, and gave hidden states alone."""
        self.is_skipped = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.is_skipped:
            return arguments[0]
        self._before()
        result = self.layer(*arguments, **named)
        self._after()
        self.gives_hidden = bool(arguments) and isinstance(result, torch.Tensor)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _kind_of(layer: nn.Module) -> list[object]:
    """Return what two layers have in common that run the same code: all but their weights' values."""
    kind: list[object] = []
    for name, module in layer.named_modules():
        values = {key: value for key, value in vars(module).items() if _is_plain(value)}
        values.pop("layer_idx", None)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        kind += [name, type(module), values, [(key, each.shape, each.dtype) for key, each in tensors]]
    return kind


def _is_plain(value: object) -> bool:
    """Return whether a module's value is one by which code may differ, and which can be compared."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | Enum | NoneType)
