"""Experts on a GPU, as one operator that the compiler does not look into.

transformers' experts call an implementation by a name in their configuration. Ours goes by the number of
pairs of a token and an expert, which a compiled layer does not know. The kernels for one token
(`kernels/one_token_experts.py`) and for few pairs, which one launch puts in order
(`kernels/grouped_experts.py`), read the weights of the experts that are hit and nothing else; many pairs go
through torch's grouped product, whose tiles suit them. It reads bfloat16; and 8-bit floats with one scale an
output (`quantized_experts.py`), by rows that are rounded to 8-bit floats too, as `QuantizedProduct` does.
Many pairs of other floats, and of other levels, go through the kernels: to write all levels of a layer out
would take memory for two to four times as many bytes as they have.

Experts that are not plain (biases, another activation or gate) keep the implementation of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from engine.kernels.devices import HOPPER, capability
from engine.kernels.expert_scales import ExpertScales
from engine.kernels.grouped_experts import MAX_PAIRS, grouped_experts
from engine.kernels.many_pairs import Tally, added_up, gated, ordered_pairs
from engine.kernels.one_token_experts import one_token_experts
from engine.kernels.round_rows import round_rows
from engine.opaque import opaque
from engine.quantized_experts import QuantizedExperts, is_plain, is_stack
from engine.tensor_parallel import ExpertShare

EXPERTS_NAME = "conductor_experts"
"""Name of our experts in a model's configuration."""


def use_experts(model: PreTrainedModel) -> bool:
    """Let a model's experts, if it has any, be computed here; return whether the kernels compute them.

    The kernels count what is chosen where a module has `choices` and `slots` (`engine/expert_load.py`)."""
    experts = [module for module in model.modules() if is_stack(getattr(module, "gate_up_proj", None))]
    quantized = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    if not experts and not quantized:
        return False
    for module in quantized:
        module.product = _quantized
        module.gate_up_proj.use_kernels()
        module.down_proj.use_kernels()
    in_kernels = all(map(is_plain, experts))
    if experts and in_kernels:
        ExpertsInterface.register(EXPERTS_NAME, _experts)
        model.set_experts_implementation(EXPERTS_NAME)
    if in_kernels:
        for module in [*experts, *quantized]:
            module.register_buffer("choices", torch.zeros(0, dtype=torch.int64, device=model.device), False)
            module.register_buffer("slots", torch.zeros(0, dtype=torch.int32, device=model.device), False)
        for module in model.modules():
            if isinstance(module, ExpertShare):
                # The kernels leave out what no expert has.
                module.outside = module.num_experts
    elif model.dtype != torch.bfloat16:
        # torch's grouped product is bfloat16's; its stand-in waits for the device at each layer.
        model.set_experts_implementation("batched_mm")
    return in_kernels


def _experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' experts; the names of the arguments are transformers'."""
    weights = [module.gate_up_proj, module.down_proj]
    output: torch.Tensor = experts(
        hidden, weights, 0, top_k_index, top_k_weights, module.choices, module.slots
    )
    return output


def _quantized(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    gate_up, down = module.gate_up_proj, module.down_proj
    weights = [gate_up.levels, down.levels, gate_up.scales, down.scales]
    output: torch.Tensor = experts(
        hidden, weights, module.group, chosen, shares, module.choices, module.slots
    )
    return output


@opaque(
    lambda hidden, *_: torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device),
    changes=("choices",),
)
def experts(
    hidden: torch.Tensor,
    weights: list[torch.Tensor],
    group: int,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    choices: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return each token's weighted sum over its experts, [num_tokens, hidden].

    Args:
        weights: Gate and up, and down, as `grouped_experts` has them; of levels, the scales of each too.
        group: As `ExpertScales` has it.
        chosen: [num_tokens, num_chosen] int64
        shares: [num_tokens, num_chosen]
        choices: Of no experts, nothing is counted."""
    hidden = hidden.contiguous()
    gate_up, down, *rest = weights
    scales = ExpertScales(rest[0], rest[1], group) if rest else None
    tally = Tally(choices, slots) if len(choices) else None
    if len(hidden) == 1:
        return one_token_experts(hidden, gate_up, down, chosen, shares, tally, scales)
    if chosen.numel() <= MAX_PAIRS or hidden.dtype != torch.bfloat16 or not _can_be_many(gate_up, scales):
        return grouped_experts(hidden, gate_up, down, chosen, shares, tally=tally, scales=scales)
    return _many(hidden, gate_up, down, chosen, shares, tally, scales)


def _can_be_many(gate_up: torch.Tensor, scales: ExpertScales | None) -> bool:
    """Return whether torch's grouped product takes experts: floats, or on Hopper alone fp8 without groups."""
    if scales is None:
        return True
    has_groups = max(each.shape[-1] for each in scales[:2]) > 1
    # its rows are 16 bytes at a time, of the inner width too
    is_odd = gate_up.shape[1] % 32 or gate_up.shape[2] % 16
    if has_groups or is_odd or gate_up.dtype != torch.float8_e4m3fn:
        return False
    return capability(gate_up.device) == HOPPER


def _many(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    tally: Tally | None,
    scales: ExpertScales | None,
) -> torch.Tensor:
    """Compute many pairs by torch's grouped product."""
    chosen, weights = chosen.contiguous(), weights.contiguous()
    tokens, places, ends = ordered_pairs(chosen, len(gate_up), tally)
    if scales is None:
        inner = gated(grouped_mm(hidden[tokens], gate_up.transpose(1, 2), offs=ends))
        made = grouped_mm(inner, down.transpose(1, 2), offs=ends)
    else:
        levels, steps = round_rows(hidden)
        inner = gated(_scaled(levels[tokens], steps[tokens], gate_up, scales.gate_up, ends))
        made = _scaled(*round_rows(inner), down, scales.down, ends)
    return added_up(made, places, chosen, weights, len(gate_up))


def _scaled(
    levels: torch.Tensor, steps: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return the product of rows of levels with their experts' levels, [num_pairs, out_features] bfloat16."""
    return torch._scaled_grouped_mm(
        levels, weight.transpose(1, 2), steps[:, 0], scales[:, :, 0], offs=ends,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
