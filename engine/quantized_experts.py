"""Experts whose weights have few bits: which experts can have them, and what computes them.

A `QuantizedExperts` stands where a family's module of experts stood, from loading on, and is called as that
was. It has the weights of all experts stacked as the family has them, levels of any `WeightFormat`, and a
scale for each expert, output and group of inputs; of four bits perhaps a zero point too.

Only the experts that tokens are sent to are written out, one after the other, in the rows' dtype, and rows
are not rounded. On a GPU other products take the place of this (`gpu_experts.py`). Experts with biases, or
with another activation or gate, stay floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import linear, silu

from base.errors import ConfigError
from engine.nibbles import in_words
from engine.quantized_weight import FORMATS, GROUP, SMALL_GROUP, QuantizedWeight, WeightFormat, quantized

SILU = ("SiLU", "SiLUActivation")
"""Names of the activation that is computed here and in the kernels."""

STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacked weights in the modules of all families, and in ours."""


class ExpertWeights(nn.Module):
    """The weights of one product of all experts, as levels.

    Attributes:
        levels: [num_experts, out_features, in_features], of four bits half as many bytes; see `FORMATS`.
        scales: [num_experts, out_features, num_groups] float32; once `use_kernels` was called, of four bits
            the words that these read.
        zeros: As the scales, of four bits alone; None: 0.
        group: Inputs that share a scale; the last group may have fewer.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(
        self, levels: torch.Tensor, scales: torch.Tensor, group: int, zeros: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("levels", levels)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.group = group

    @classmethod
    def room_for(cls, num_experts: int, out_features: int, like: QuantizedWeight) -> Self:
        """Return memory for experts with the format, inputs and groups of one weight, where it lies."""
        levels, scales = (
            part.new_empty((num_experts, out_features, part.shape[1])) for part in (like.levels, like.scales)
        )
        return cls(levels, scales, like.group)

    def put(self, expert: int, first: int, weight: QuantizedWeight) -> None:
        """Write the outputs of an expert from `first` on.

        Raises ValueError for a weight of another format, other inputs or other groups."""
        levels, scales = self.levels, self.scales
        kinds = [(part.dtype, part.shape[-1]) for part in (levels, weight.levels, scales, weight.scales)]
        if kinds[0] != kinds[1] or kinds[2] != kinds[3] or weight.group != self.group:
            raise ValueError("its inputs share scales otherwise than those of the other experts")
        rows = slice(first, first + weight.out_features)
        levels[expert, rows].copy_(weight.levels)
        scales[expert, rows].copy_(weight.scales)
        if weight.zeros is not None:
            if self.zeros is None:
                self.zeros = torch.zeros_like(scales)
            self.zeros[expert, rows].copy_(weight.zeros)

    @property
    def format(self) -> WeightFormat:
        return FORMATS[self.levels.dtype]

    def use_kernels(self) -> None:
        """Let scales and zero points be as the kernels of a GPU read them."""
        if self.format is WeightFormat.INT4 and self.scales.is_floating_point():
            self.scales, self.zeros = in_words(self.scales, self.zeros), None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move levels and scales; both keep their dtypes."""
        device = fn(torch.empty(0, device=self.levels.device)).device
        super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]
        return self

    def expert(self, index: int) -> QuantizedWeight:
        """Return the weight of one expert, a view."""
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedWeight(self.format, self.levels[index], self.scales[index], self.group, zeros)

    def keep(self, first: int, count: int) -> None:
        """Forget all but `count` experts from `first` on."""
        # Copies: views would keep the whole alive.
        self.levels = self.levels[first : first + count].clone()
        self.scales = self.scales[first : first + count].clone()
        self.zeros = None if self.zeros is None else self.zeros[first : first + count].clone()


class QuantizedExperts(nn.Module):
    """Silu-gated experts of few bits; called as transformers' experts are.

    Attributes:
        product: What computes them.
    """

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, num_all: int | None = None) -> None:
        """Take weights of one format and, of several groups, equal ones; raises ValueError for others.

        Args:
            num_all: Experts of the whole model, of which a rank may have read its share; None: these."""
        super().__init__()
        if gate_up.format is not down.format:
            formats = f"{gate_up.format.value}, and down of {down.format.value}"
            raise ValueError(f"gate and up have levels of {formats}: the three must be alike")
        groups = {each.group for each in (gate_up, down) if each.scales.shape[-1] > 1}
        if len(groups) > 1:
            raise ValueError(f"gate, up and down have groups of {sorted(groups)} inputs")
        self.gate_up_proj, self.down_proj = gate_up, down
        self.group = groups.pop() if groups else 0
        """Inputs that share a scale, where there are several groups."""
        self.num_experts = len(gate_up.levels)
        self.num_all = num_all or self.num_experts
        self.product: Callable[..., torch.Tensor] = written_out

    def keep(self, first: int, count: int) -> None:
        """Forget all but `count` experts from `first` on; no effect where these alone were read."""
        if self.num_experts < self.num_all:
            return
        self.gate_up_proj.keep(first, count)
        self.down_proj.keep(first, count)
        self.num_experts = count

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.product(self, hidden, chosen, weights)


def written_out(
    experts: QuantizedExperts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return each token's weighted sum, by writing out one after the other what experts are hit.

    Args:
        hidden: [num_tokens, hidden]
        chosen: [num_tokens, num_chosen] int64; `num_experts` and above add nothing.
        weights: [num_tokens, num_chosen]"""
    output = torch.zeros_like(hidden)
    for expert in torch.unique(chosen).tolist():
        if expert >= experts.num_experts:
            continue
        tokens, places = torch.where(chosen == expert)
        gate_up = experts.gate_up_proj.expert(expert).dequantized(hidden.dtype)
        gate, up = linear(hidden[tokens], gate_up).chunk(2, dim=-1)
        made = linear(silu(gate) * up, experts.down_proj.expert(expert).dequantized(hidden.dtype))
        output.index_add_(0, tokens, (made * weights[tokens, places, None]).to(output.dtype))
    return output


def is_plain(module: Any) -> bool:
    """Return whether a module's experts are silu-gated products without biases, stacked in two parameters."""
    if not all(is_stack(getattr(module, name, None)) for name in STACKS) or not hasattr(module, "act_fn"):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None or gate.__module__ != "transformers.integrations.moe":
        return False  # the family computes them in a way of its own
    is_odd = module.is_transposed or module.has_bias or not module.has_gate
    is_odd = is_odd or getattr(module, "has_post_expert_norm", False)
    return not is_odd and type(module.act_fn).__name__ in SILU


def is_stack(weight: Any) -> bool:
    """Return whether something is the parameter that has one weight of each expert."""
    return isinstance(weight, nn.Parameter) and weight.dim() == 3


def quantize_experts(
    model: nn.Module, weight_format: WeightFormat, device: torch.device | None = None
) -> None:
    """Replace the experts of a finished model, or of a part of one, in place, by the nearest levels.

    Each lies where its floats lay. `device` computes the levels, one expert at a time; None: where they lie.

    Raises ConfigError for four bits of an odd number of inputs."""
    found = experts_in(model)
    while found:
        # Let go of, layer by layer: the floats of all and their levels may be more than a GPU has room for.
        parent, name, module = found.pop()
        stacks = [getattr(module, stack).detach() for stack in STACKS]
        try:
            groups = _groups(stacks) if weight_format is WeightFormat.INT4 else (None, None)
            gate_up, down = (
                _nearest(stack, weight_format, group, device)
                for stack, group in zip(stacks, groups, strict=True)
            )
        except ValueError as error:
            raise ConfigError(f"quantization: {name}: {error}") from error
        setattr(parent, name, QuantizedExperts(gate_up, down))


def experts_in(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the plain experts of floats in a model, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child)
    ]


def require_plain_experts(model: nn.Module) -> None:
    """Raise ConfigError if a model has weights of several experts that cannot have levels."""
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 2:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if not is_plain(owner):
            raise ConfigError(
                f"quantization: {name} is the weight of several experts, with biases or a gate of their own, "
                "which can be served unquantised alone: say quantization: none"
            )


def _groups(stacks: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the inputs that share a scale of four bits in each weight: as many in all, or all of a weight's.

    Raises ValueError for an odd number of inputs."""
    inputs = [stack.shape[2] for stack in stacks]
    if odd := [each for each in inputs if each % 2]:
        raise ValueError(f"int4: {odd[0]} inputs are no even number")
    whole = [each for each in inputs if each % SMALL_GROUP == 0]
    group = next(
        group for group in (GROUP, GROUP // 2, SMALL_GROUP) if not any(each % group for each in whole)
    )
    return tuple(group if each in whole else each for each in inputs)


@torch.no_grad()
def _nearest(
    weight: torch.Tensor, weight_format: WeightFormat, group: int | None, device: torch.device | None
) -> ExpertWeights:
    made: ExpertWeights | None = None
    for expert, floats in enumerate(weight):
        found = quantized(floats if device is None else floats.to(device), weight_format, group)
        found = found.on(weight.device)
        made = made or ExpertWeights.room_for(len(weight), weight.shape[1], found)
        made.put(expert, 0, found)
    assert made is not None
    return made
