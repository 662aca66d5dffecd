"""Layer ends: when which layers of a step that is queued on a GPU are computed.

A long chunk's first layers are done long before its last, and their KV can leave meanwhile. So
after each group of layers an event is recorded on the device's stream, from outside of what
is compiled: the last layer of a group is wrapped in the model's list of layers. A step that
runs as a CUDA graph is queued as one and tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.step import LayerGroup

Mark = Callable[[], Callable[[], None]]
"""Marks the place reached on the device's stream; returns what blocks until it is passed."""


def mark_on_stream() -> Callable[[], None]:
    """Mark the current stream of the current GPU."""
    # Whoever waits sleeps: spinning would take a core from the event loop.
    reached = torch.Event("cuda", blocking=True)
    reached.record()
    return reached.synchronize


class LayerEnds:
    """Owns the groups of one model's layers. Belongs to the device thread.

    Args:
        layers: The model's; the last of each group is replaced by a wrapper of it.
        num_groups: As equal as can be; 1 at least, a group for each layer at most.
    """

    def __init__(self, layers: nn.ModuleList, num_groups: int, mark: Mark = mark_on_stream) -> None:
        num_groups = min(num_groups, len(layers))
        self._ends = [len(layers) * (group + 1) // num_groups for group in range(num_groups)]
        self._mark = mark
        self._groups: list[LayerGroup] | None = None
        for end in self._ends:
            layers[end - 1] = _Watched(layers[end - 1], lambda end=end: self._reached(end))  # type: ignore[misc]

    def begin(self) -> None:
        """Mark the groups of the step that is queued from here on."""
        self._groups = []

    def end(self) -> tuple[LayerGroup, ...]:
        """Return the groups of the step that `begin` was called for."""
        groups, self._groups = self._groups or [], None
        return tuple(groups)

    def _reached(self, end: int) -> None:
        if self._groups is not None:
            first = self._groups[-1].first + self._groups[-1].count if self._groups else 0
            self._groups.append(LayerGroup(first, end - first, self._mark()))


class _Watched(nn.Module):
    """A layer, and a call after it. In all else it is the layer."""

    def __init__(self, layer: nn.Module, after: Callable[[], None]) -> None:
        super().__init__()
        self.layer = layer
        self._after = after

    def forward(self, *arguments: Any, **named: Any) -> Any:
        result = self.layer(*arguments, **named)
        self._after()
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)
