"""Rotary embeddings of DeepSeek-V2 without complex numbers, for which the compiler makes no code.

transformers turns pairs of a query's numbers by multiplying them as complex ones, in a function of the
family's file. Left to itself each compiled layer leaves its kernels for a dozen of torch's. So the angles
are given to layers as pairs of real numbers, and the function, shown these, multiplies as complex numbers do.
Shown complex angles it is what it was: other models of this process may be the family's as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as family

Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def use_real_rotary(model: nn.Module) -> None:
    """Have a model's layers turn rows by real numbers, if they would by complex ones; no effect again."""
    for module in model.modules():
        is_shown = "forward" in vars(module)
        if isinstance(module, family.DeepseekV2RotaryEmbedding) and not is_shown:
            module.forward = _as_pairs(module.forward)
            if not hasattr(family.apply_rotary_emb, "__wrapped__"):
                family.apply_rotary_emb = _taking_pairs(family.apply_rotary_emb)


def _as_pairs(angles: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(angles)
    def pairs(*arguments: Any, **named: Any) -> torch.Tensor:
        return torch.view_as_real(angles(*arguments, **named))

    return pairs


def _taking_pairs(turn: Turn) -> Turn:
    @wraps(turn)
    def taking_pairs(
        xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if freqs_cis.is_complex():
            return turn(xq, xk, freqs_cis)
        cos, sin = freqs_cis.unsqueeze(1).unbind(-1)
        return turned(xq, cos, sin), turned(xk, cos, sin)

    return taking_pairs


def turned(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return rows [1, heads, num_tokens, dim] with each pair of numbers turned by its angle.

    `cos` and `sin` are [1, 1, num_tokens, dim / 2]."""
    left, right = rows.float().reshape(*rows.shape[:-1], -1, 2).unbind(-1)
    pairs = torch.stack([left * cos - right * sin, left * sin + right * cos], dim=-1)
    return pairs.flatten(-2).type_as(rows)
