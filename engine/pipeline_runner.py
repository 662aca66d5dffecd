"""Runner of a pipeline on CPUs: a step is sent to all stages at once, and ends in the last.

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
from engine.ranks import Ranks
from engine.runner import Share, StepRunner, WaitForMasks, masks_of, run_batch
from engine.step import LaunchedStep, LayerGroup, StepPlan, StepResult, arrivals_of, loads_of
from engine.token_masks import TokenMasks


class PipelineRunner(StepRunner):
    """Owns this rank's share of the model while a step runs. Belongs to the device thread.

    Only the first rank has `ranks`, the others.
    """

    is_pipelined = True
    can_score = True
    poolings = tuple(Pooling)

    def __init__(
        self,
        model: PagedModel,
        cache: PagedCache,
        stage: Stage,
        stage_layers: tuple[int, ...],
        clock: Clock,
        ranks: Ranks | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._stage_layers = stage_layers
        self._clock = clock
        self._ranks = ranks
        self._began_s = 0.0
        self._masks = TokenMasks()
        stage.on_taken_in = self._begin
        self._hooks = LayerHooks(layers_of(model.module), 1)
        # One waits for the first stage, which never waits for the event loop.
        self.max_steps = len(stage_layers) + 1
        # Of this rank's layers: every rank waits for its own.
        self.prefix_parts = prefix_parts(self._hooks.num_layers)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Have the stages before begin with a step."""
        assert self._ranks is not None, "the first rank launches"
        wait_masks = masks_of(plan, self._masks)
        batch = build_batch(plan, self._cache.layout.block_size, self._model.device)
        share = self._ranks.send_step(batch_numbers(batch), loads_of(plan))
        own: Future[None] = Future()
        groups = stage_groups(self._stage_layers, self._ranks, own.result)
        return LaunchedStep(partial(self._resolve, plan, batch, own, wait_masks, share), groups)

    def _resolve(
        self, plan: StepPlan, batch: Batch, own: Future[None], wait_masks: WaitForMasks, share: Share
    ) -> StepResult:
        """Run the last stage's share of a step, once the stages before have run theirs; then end `own`."""
        try:
            with self._hooks.waiting_for(arrivals_of(plan)):
                result = run_batch(self._model, self._cache, batch, plan, wait_masks, share)
            own.set_result(None)
            return replace(result, busy_s=self._clock.now_s() - self._began_s)
        finally:
            if not own.done():
                own.set_exception(LostError("the step that this sequence was in failed; see the node's log"))

    def follow(self, numbers: torch.Tensor, arrivals: list[PrefixArrivals]) -> Callable[[], None]:
        """Run this rank's share of a step of the first rank's."""
        with self._hooks.waiting_for(arrivals):
            self._model.forward(batch_from_numbers(numbers, self._model.device), self._cache)
        return lambda: None

    def _begin(self) -> None:
        self._began_s = self._clock.now_s()


def stage_groups(
    stage_layers: tuple[int, ...], ranks: Ranks, wait_for_own: Callable[[], None]
) -> tuple[LayerGroup, ...]:
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
