"""Pooling: one vector of a prompt, made of the last hidden states of its tokens.

A decoder ends with a hidden state for each token, behind its last norm, of which the model's head makes
logits. Whoever wants a vector has those states added up, chunk by chunk, and no token is drawn. A cached
block has K and V and no hidden states: so a vector of the last token alone, which is always computed, can
begin with a matched prefix, and a mean cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from base.request import Pooling
from engine.sequence import Vector
from engine.step import StepEntry, StepPlan


class HiddenStates:
    """The last hidden states of a step, kept where somebody asks. Belongs to the device thread."""

    def __init__(self, decoder: nn.Module) -> None:
        """Listen to a decoder, which is a causal model without its head."""
        decoder.register_forward_hook(self._ended)
        self._is_wanted = False
        self._states: torch.Tensor | None = None

    @contextmanager
    def kept(self, plan: StepPlan) -> Iterator[None]:
        """Keep the states of the step that runs in the body, if one of its entries is pooled."""
        self._is_wanted = any(entry.pooled for entry in plan.entries)
        try:
            yield
        finally:
            self._is_wanted, self._states = False, None

    def pooled(self, plan: StepPlan) -> tuple[Vector | None, ...]:
        """Return what each entry adds to its sequence's vector; within `kept`, once the step has run."""
        if self._states is None:
            return ()
        start, found = 0, []
        for entry in plan.entries:
            found.append(_sum(self._states[start : start + entry.num_tokens], entry))
            start += entry.num_tokens
        return tuple(found)

    def _ended(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._is_wanted:
            self._states = output[0][0]


def _sum(states: torch.Tensor, entry: StepEntry) -> Vector | None:
    """Return the weighted sum of the pooled ones of an entry's states, [num_tokens, hidden_size]."""
    places = entry.pooled
    if not places:
        return None
    rows = states[places.start - entry.start : places.stop - entry.start].double()
    if entry.sequence.pooling is Pooling.WEIGHTED_MEAN:
        rows = rows * torch.arange(places.start + 1, places.stop + 1, device=rows.device)[:, None]
    total: Vector = rows.sum(0).cpu().numpy().astype(np.float64)
    return total
