"""Experts on a GPU, as one operator that the compiler does not look into.

transformers' experts call an implementation by a name in their configuration. Ours goes by the number of
pairs of a token and an expert, which a compiled layer does not know. The kernels for one token
(`kernels/one_token_experts.py`) and for few pairs, which one launch puts in order
(`kernels/grouped_experts.py`), read the weights of the experts that are hit and nothing else; many pairs go
through torch's grouped product, whose tiles suit them.

Experts that are not plain (biases, another activation or gate) keep the implementation of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from engine.kernels.grouped_experts import MAX_PAIRS, grouped_experts
from engine.kernels.many_pairs import Tally, added_up, gated, ordered_pairs
from engine.kernels.one_token_experts import one_token_experts
from engine.opaque import opaque
from engine.tensor_parallel import ExpertShare

EXPERTS_NAME = "conductor_experts"
"""Name of our experts in a model's configuration."""

SILU = ("SiLU", "SiLUActivation")
"""Names of the activation that the kernels have."""


def use_experts(model: PreTrainedModel) -> bool:
    """Let a model's experts, if it has any, be computed here; return whether the kernels compute them.

    The kernels count what is chosen where a module has `choices` and `slots` (`engine/expert_load.py`)."""
    experts = [
        module for module in model.modules() if hasattr(module, "gate_up_proj") and _is_stacked(module)
    ]
    if not experts:
        return False
    ExpertsInterface.register(EXPERTS_NAME, _experts)
    in_kernels = all(map(is_plain, experts))
    if in_kernels:
        model.set_experts_implementation(EXPERTS_NAME)
        for module in experts:
            module.register_buffer("choices", module.gate_up_proj.new_zeros(0, dtype=torch.int64), False)
            module.register_buffer("slots", module.gate_up_proj.new_zeros(0, dtype=torch.int32), False)
        for module in model.modules():
            if isinstance(module, ExpertShare):
                # The kernels leave out what no expert has.
                module.outside = module.num_experts
    elif model.dtype != torch.bfloat16:
        # torch's grouped product is bfloat16's; its stand-in waits for the device at each layer.
        model.set_experts_implementation("batched_mm")
    return in_kernels


def is_plain(module: Any) -> bool:
    """Return whether a module's experts are silu-gated products without biases, which the kernels compute."""
    has_own_gate = type(module)._apply_gate.__module__ != "transformers.integrations.moe"
    is_odd = module.is_transposed or module.has_bias or not module.has_gate or has_own_gate
    is_odd = is_odd or getattr(module, "has_post_expert_norm", False)
    return not is_odd and type(module.act_fn).__name__ in SILU


def _is_stacked(module: Any) -> bool:
    return isinstance(module.gate_up_proj, nn.Parameter) and module.gate_up_proj.dim() == 3


def _experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' experts; the names of the arguments are transformers'."""
    if not is_plain(module):
        other: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, top_k_index, top_k_weights)
        return other
    output: torch.Tensor = experts(
        hidden,
        module.gate_up_proj,
        module.down_proj,
        top_k_index,
        top_k_weights,
        module.choices,
        module.slots,
    )
    return output


@opaque(
    lambda hidden, *_: torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device),
    changes=("choices",),
)
def experts(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    choices: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return each token's weighted sum over its experts; arguments as `grouped_experts`.

    `choices` of no experts counts nothing."""
    hidden = hidden.contiguous()
    tally = Tally(choices, slots) if len(choices) else None
    if len(hidden) == 1:
        return one_token_experts(hidden, gate_up, down, chosen, weights, tally)
    if chosen.numel() <= MAX_PAIRS:
        return grouped_experts(hidden, gate_up, down, chosen, weights, tally=tally)
    if hidden.dtype != torch.bfloat16:
        size = MAX_PAIRS // chosen.shape[1]
        slices = [slice(start, start + size) for start in range(0, len(hidden), size)]
        return torch.cat(
            [
                grouped_experts(
                    hidden[rows], gate_up, down, chosen[rows], weights[rows], tally=tally and tally.of(rows)
                )
                for rows in slices
            ]
        )
    return _many(hidden, gate_up, down, chosen, weights, tally)


def _many(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    tally: Tally | None,
) -> torch.Tensor:
    """Compute many pairs by torch's grouped product."""
    chosen, weights = chosen.contiguous(), weights.contiguous()
    tokens, places, ends = ordered_pairs(chosen, len(gate_up), tally)
    inner = gated(grouped_mm(hidden[tokens], gate_up.transpose(1, 2), offs=ends))
    made = grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return added_up(made, places, chosen, weights, len(gate_up))
