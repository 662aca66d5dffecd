"""Runner: one step on the device. Plan in, tokens out.

Called by the device thread alone (`engine/loop.py`), so nothing in here is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from base.request import Pooling
from engine.arrivals import PrefixArrivals
from engine.batch import Batch, batch_from_numbers, batch_numbers, build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.prompt_logprobs import logprobs_of_prompts
from engine.sampler import sample
from engine.step import LaunchedStep, StepPlan, StepResult, result_of, wait_for_prefixes
from engine.swap_space import HostBlocks
from engine.token_masks import TokenMasks, constrained

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


class Runner(StepRunner):
    """Owns the model and the cache while a step runs.

    Args:
        send_step: Reaches the other ranks of a model that is cut, on the first.
        host_blocks: Memory that preempted sequences' blocks go to; None: plans move none.
    """

    can_score = True
    poolings = tuple(Pooling)

    def __init__(
        self,
        model: PagedModel,
        cache: PagedCache,
        send_step: SendStep | None = None,
        host_blocks: HostBlocks | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._send_step = send_step
        self._host_blocks = host_blocks
        self._masks = TokenMasks()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, and sample where the plan says so."""
        wait_for_prefixes(plan)
        if self._host_blocks is not None:
            self._host_blocks.move(plan.swaps)
        if not plan.entries:
            return StepResult(())
        wait_masks = masks_of(plan, self._masks)
        batch = build_batch(plan, self._cache.layout.block_size, self._model.device)
        share = nullcontext() if self._send_step is None else self._send_step(batch_numbers(batch))
        return run_batch(self._model, self._cache, batch, plan, wait_masks, share)

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> None:
        """Run this rank's share of a step of the first rank's, which samples and has waited for prefixes."""
        self._model.forward(batch_from_numbers(numbers, self._model.device), self._cache)


WaitForMasks = Callable[[], torch.Tensor | None]


def masks_of(plan: StepPlan, masks: TokenMasks) -> WaitForMasks:
    """Begin to compute a plan's masks, if there are any; return what waits for them."""
    sequences = constrained(plan.sampling)
    return masks.begin(sequences) if sequences else lambda: None


def run_batch(
    model: PagedModel,
    cache: PagedCache,
    batch: Batch,
    plan: StepPlan,
    wait_masks: WaitForMasks,
    share: Share,
) -> StepResult:
    """Compute a plan's tokens, write their KV, and sample where the plan says so."""
    with share, model.hidden.kept(plan):
        logits, num_sampling = model.forward(batch, cache), len(plan.sampling)
        pooled = model.hidden.pooled(plan)
    result = result_of(plan, sample(logits[:num_sampling], plan.sampling, wait_masks()))
    return replace(result, prompt_logprobs=logprobs_of_prompts(logits[num_sampling:], plan), pooled=pooled)
