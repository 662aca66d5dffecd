"""Runner on CPUs: a step is computed when it is resolved, here alone or by all ranks of a model that is cut.

A step is sent to all stages of a pipeline at once, and ends in the last:

    stage 0        c0 | c1 | c2 | c3
    stage 1             c0 | c1 | c2 | c3
    stage 2 (ours)           c0 | c1 | c2 | c3

The first rank launches a step by sending it to the others, which takes no time, and computes its own share
when the step is resolved; by then the stages before it are at later chunks. Every rank has the same block
tables, so a block id means the same place in each cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from base.clock import Clock
from base.errors import LostError
from base.request import Pooling
from engine.arrivals import PrefixArrivals, prefix_parts
from engine.batch import Batch, batch_from_numbers, batch_numbers, build_batch
from engine.layer_hooks import LayerHooks
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.pipeline import Stage, layers_of
from engine.prompt_logprobs import logprobs_of_prompts
from engine.ranks import Ranks
from engine.runner import Share, StepRunner, Wait
from engine.sampler import sample
from engine.step import (
    LaunchedStep,
    LayerGroup,
    StepPlan,
    StepResult,
    arrivals_of,
    loads_of,
    result_of,
    wait_for_prefixes,
)
from engine.swap_space import HostBlocks
from engine.token_masks import TokenMasks, constrained


class Runner(StepRunner):
    """Owns the model, or this rank's share of it, and the cache while a step runs.

    Args:
        clock: Says how long the last stage of a pipeline was at a step.
        ranks: The others of a model that is cut, on the first.
        host_blocks: Memory that preempted sequences' blocks go to; None: plans move none.
        stage: The stage of a pipeline that the model was cut to, None: it has no stages.
        stage_layers: Number of layers of each stage.
    """

    can_score = True
    poolings = tuple(Pooling)

    def __init__(
        self,
        model: PagedModel,
        cache: PagedCache,
        clock: Clock,
        ranks: Ranks | None = None,
        host_blocks: HostBlocks | None = None,
        stage: Stage | None = None,
        stage_layers: tuple[int, ...] = (),
    ) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        self._ranks = ranks
        self._host_blocks = host_blocks
        self._stage_layers = stage_layers
        self._masks = TokenMasks()
        self._began_s: float | None = None
        self._hooks: LayerHooks | None = None
        if stage is not None:
            stage.on_taken_in = self._begin
            self._hooks = LayerHooks(layers_of(model.module), 1)
            self.is_pipelined = True
            # One waits for the first stage, which never waits for the event loop.
            self.max_steps = len(stage_layers) + 1
            # Of this rank's layers: every rank waits for its own.
            self.prefix_parts = prefix_parts(self._hooks.num_layers)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Have the stages before, if there are any, begin with a step."""
        if not self.is_pipelined:
            return super().launch(plan)
        assert self._ranks is not None, "the first rank launches"
        run = self._sent(plan)
        own: Future[None] = Future()
        groups = stage_groups(self._stage_layers, self._ranks, own.result)
        return LaunchedStep(partial(_ending, run, own), groups)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, and sample where the plan says so."""
        wait_for_prefixes(plan)
        if self._host_blocks is not None:
            self._host_blocks.move(plan.swaps)
        return self._sent(plan)() if plan.entries else StepResult(())

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> Wait | None:
        """Run this rank's share of a step of the first rank's, which samples."""
        self._compute(batch_from_numbers(numbers, self._model.device), arrivals)
        return (lambda: None) if self.is_pipelined else None

    def _sent(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Send a step to the other ranks, if there are any; return what runs this one's share."""
        wait_masks = masks_of(plan, self._masks)
        batch = build_batch(plan, self._cache.layout.block_size, self._model.device)
        share: Share = nullcontext()
        if self._ranks is not None:
            share = self._ranks.send_step(batch_numbers(batch), loads_of(plan))
        return partial(self._run, plan, batch, share, wait_masks)

    def _run(self, plan: StepPlan, batch: Batch, share: Share, wait_masks: WaitForMasks) -> StepResult:
        with share, self._model.hidden.kept(plan):
            logits, num_sampling = self._compute(batch, arrivals_of(plan)), len(plan.sampling)
            pooled = self._model.hidden.pooled(plan)
        sampled = sample(logits[:num_sampling], plan.sampling, wait_masks())
        logprobs = logprobs_of_prompts(logits[num_sampling:], plan)
        busy_s = 0.0 if self._began_s is None else self._clock.now_s() - self._began_s
        return replace(result_of(plan, sampled, busy_s), prompt_logprobs=logprobs, pooled=pooled)

    def _compute(self, batch: Batch, arrivals: list[PrefixArrivals]) -> torch.Tensor:
        with nullcontext() if self._hooks is None else self._hooks.waiting_for(arrivals):
            return self._model.forward(batch, self._cache)

    def _begin(self) -> None:
        self._began_s = self._clock.now_s()


def _ending(run: Callable[[], StepResult], own: Future[None]) -> StepResult:
    """Run the last stage's share of a step, once the stages before have run theirs; then end `own`."""
    try:
        result = run()
        own.set_result(None)
        return result
    finally:
        if not own.done():
            own.set_exception(LostError("the step that this sequence was in failed; see the node's log"))


def stage_groups(stage_layers: tuple[int, ...], ranks: Ranks, wait_for_own: Wait) -> tuple[LayerGroup, ...]:
    """Return a group of layers for each stage, in the step that was sent last.

    `wait_for_own` blocks until the first rank has run its share."""
    step = ranks.num_sent_steps

    def wait(of_stage: list[int]) -> None:
        if 0 in of_stage:
            wait_for_own()
        ranks.wait_ran(of_stage, step)

    firsts = [0, *accumulate(stage_layers)]
    return tuple(
        LayerGroup(firsts[stage], count, partial(wait, ranks.shape.ranks_of(stage)))
        for stage, count in enumerate(stage_layers)
    )


WaitForMasks = Callable[[], torch.Tensor | None]


def masks_of(plan: StepPlan, masks: TokenMasks) -> WaitForMasks:
    """Begin to compute a plan's masks, if there are any; return what waits for them."""
    sequences = constrained(plan.sampling)
    return masks.begin(sequences) if sequences else lambda: None
