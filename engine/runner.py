"""Runner: one step on the device. Plan in, tokens out.

Called by the device thread alone (`engine/loop.py`), so nothing in here is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial

import torch

from base.request import Pooling
from engine.arrivals import PrefixArrivals
from engine.step import LaunchedStep, StepPlan, StepResult

Share = AbstractContextManager[None]
"""The context in which the first rank runs its share of a step."""

SendStep = Callable[[torch.Tensor], Share]
"""Sends a row of int64 on the host to the other ranks of a model, for their `follow`."""

Wait = Callable[[], None]
"""Blocks until a step has run, on any thread."""


class StepRunner:
    """Runs steps in the order in which they are launched. Any method may raise anything."""

    max_steps = 1
    """Steps under way at a time; a second is launched before the tokens of the first are known."""
    is_pipelined = False
    """Whether steps are launched while another thread waits for one, and take no token of one under way."""
    prefix_parts: tuple[int, ...] = ()
    """Number of layers of each part in which a prefix may come while a step runs; empty: it may not."""
    can_score = False
    """Whether steps report the log probabilities of prompts."""
    poolings: Collection[Pooling] = ()
    """The kinds of vectors that steps can make of prompts."""

    def begin(self) -> None:
        """Make ready, before the first step, what the device thread alone can."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step; without a queue, run it when it is waited for."""
        return LaunchedStep(partial(self.execute, plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step, of a device without a queue."""
        raise NotImplementedError

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> Wait | None:
        """Run or queue this rank's share of a step that the first rank has sent.

        The step reads `arrivals`, which are still being loaded on this rank. Returns what waits for the step,
        where somebody has to know that this rank has run it; None: it has when the first rank has.
        """
        raise NotImplementedError
