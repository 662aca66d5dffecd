"""Expert load: how evenly tokens go to a model's experts, and to the ranks that hold them.

Each layer of experts adds the choices of a step's tokens to its row of counters on the device, as a part of
the step. Nothing waits for it, and a step that was captured counts too; padding does not. Whoever asks gets a
copy of the counters, a few times a minute at most. On a GPU they are added to where the kernels put choices
in order anyway, so that a step has no launch more.

The router is whole on every rank, and rank 0 counts before it leaves out the experts of others: it knows
where the tokens of all ranks go. In a pipeline it knows the layers of its own stage.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn

from base.clock import Clock
from base.messages import ExpertLoad
from engine.opaque import opaque
from engine.quantized_experts import QuantizedExperts, is_stack
from engine.tensor_parallel import ExpertShare

READ_S = 5.0
"""Seconds for which a copy of the counters is new."""

PERIOD_S = 60.0
"""Seconds after which what was counted before the last such time is forgotten, if anything came since."""


class ExpertCounts:
    """Owns the counters of one model's layers of experts: choices of each since the start."""

    def __init__(self, layers: list[nn.Module], num_experts: int, num_ranks: int) -> None:
        """Count nothing yet; `layers` are what takes hidden states, choices and weights, in their order."""
        self._layers = layers
        self.num_ranks = num_ranks
        device = next(itertools.chain(layers[0].parameters(), layers[0].buffers())).device
        self.counts = torch.zeros((len(layers), num_experts), dtype=torch.int64, device=device)
        self._rows = torch.zeros(0, dtype=torch.int32, device=device)
        self._host: torch.Tensor | None = None
        self._copying: torch.cuda.Stream | None = None

    def count_all(self) -> None:
        """Count what every row chooses, from here on; for a CPU, where no row is padding."""
        for layer, counts in zip(self._layers, self.counts, strict=True):
            layer.register_forward_pre_hook(partial(_count_all, counts))

    def count_slots(self, max_tokens: int, in_kernels: bool, cut: nn.Module | None = None) -> None:
        """Count what the rows choose that `begin` named, from here on; for a GPU.

        Args:
            max_tokens: Rows of the largest step.
            in_kernels: Whether experts that are no share count by themselves, given the tensors.
            cut: A last layer that computes some rows of a step alone, which are not counted."""
        device = self.counts.device
        self._rows = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            self._host = torch.empty(self.counts.shape, dtype=torch.int64, pin_memory=True)
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        inside = set() if cut is None else set(cut.modules())
        padding = torch.full_like(self._rows, -1)
        for layer, counts in zip(self._layers, self.counts, strict=True):
            # Buffers, because a compiled layer takes these as it takes weights. Of the same lengths in each
            # layer, or the compiler would make a variant of the last one.
            layer.register_buffer("choices", counts, persistent=False)
            layer.register_buffer("slots", padding if layer in inside else self._rows, persistent=False)
            if isinstance(layer, ExpertShare) or not in_kernels:
                layer.register_forward_pre_hook(_count_slots)

    def begin(self, slots: torch.Tensor) -> None:
        """Name the rows of the step that is queued from here on; those of slot -1 are padding."""
        self._rows[: len(slots)].copy_(slots)

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts.zero_()

    def copied(self) -> torch.Tensor:
        """Return the counters as they are, on the host; any thread may ask, and steps go on."""
        if self._host is None or self._copying is None:
            return self.counts.cpu().clone()
        with torch.cuda.stream(self._copying):
            self._host.copy_(self.counts, non_blocking=True)
            self._copying.synchronize()
        return self._host.clone()


def _count_all(counts: torch.Tensor, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    chosen: torch.Tensor = inputs[1].flatten()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))


def _count_slots(layer: Any, inputs: tuple[Any, ...]) -> None:
    count_choices(inputs[1], layer.choices, layer.slots)


@opaque(lambda *_: None, changes=("counts",))
def count_choices(chosen: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> None:
    """Add the choices of tokens, [num_tokens, num_chosen], to `counts`, but for those of slot -1."""
    is_token = (slots[: len(chosen)] >= 0).to(counts.dtype)
    counts.scatter_add_(0, chosen.flatten(), is_token[:, None].expand_as(chosen).flatten())


def expert_counts(model: nn.Module) -> ExpertCounts | None:
    """Return the counters of a finished model, or of a rank's share of one; None: it has no experts.

    Layers with other numbers of experts than the last have are not counted."""
    inside = {module.experts for module in model.modules() if isinstance(module, ExpertShare)}
    layers = [module for module in model.modules() if _num_experts(module) and module not in inside]
    if not layers:
        return None
    num_experts = _num_experts(layers[-1])
    layers = [layer for layer in layers if _num_experts(layer) == num_experts]
    share = layers[0]
    num_ranks = num_experts // share.num_experts if isinstance(share, ExpertShare) else 1
    return ExpertCounts(layers, num_experts, num_ranks)


def _num_experts(module: Any) -> int:
    """Return the number of experts that a module chooses from, of all ranks; 0: it is no such module."""
    if isinstance(module, ExpertShare):
        return module.num_all
    if isinstance(module, QuantizedExperts):
        return module.num_experts
    weight = getattr(module, "gate_up_proj", None)
    return len(weight) if weight is not None and is_stack(weight) else 0


class ExpertBalance:
    """Reads the load of the last minutes. Belongs to the event loop."""

    def __init__(self, counts: ExpertCounts, clock: Clock) -> None:
        """Begin, with nothing counted: graphs are captured by steps that run."""
        counts.reset()
        self._counts = counts
        self._clock = clock
        self._read_at_s: float | None = None
        self._load: ExpertLoad | None = None
        self._turned_at_s = clock.now_s()
        self._before = self._turned = torch.zeros(tuple(counts.counts.shape), dtype=torch.int64)

    def load(self) -> ExpertLoad | None:
        """Return the load of one to two periods, and of more where nothing came; None: nothing came ever."""
        now_s = self._clock.now_s()
        if self._read_at_s is not None and now_s < self._read_at_s + READ_S:
            return self._load
        self._read_at_s = now_s
        counts = self._counts.copied()
        if now_s >= self._turned_at_s + PERIOD_S and not torch.equal(counts, self._turned):
            self._before, self._turned, self._turned_at_s = self._turned, counts, now_s
        self._load = load_of(counts - self._before, self._counts.num_ranks)
        return self._load


def load_of(counts: torch.Tensor, num_ranks: int) -> ExpertLoad | None:
    """Return what counters say of [num_layers, num_experts] choices; None: there are none.

    Ranks have equal numbers of experts, one after the other."""
    counts = counts[counts.sum(1) > 0].double()
    if not len(counts):
        return None
    of_ranks = counts.view(len(counts), num_ranks, -1).sum(2)
    busiest = counts.amax(1) / counts.mean(1)
    return ExpertLoad(
        num_choices=int(counts.sum(1).amax()),
        busiest=float(busiest.mean()),
        busiest_of_a_layer=float(busiest.amax()),
        busiest_rank=float((of_ranks.amax(1) / of_ranks.mean(1)).mean()),
        ranks=tuple((of_ranks.sum(0) / of_ranks.sum() * num_ranks).tolist()),
    )
