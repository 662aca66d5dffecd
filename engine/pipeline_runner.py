"""Runner of a pipeline on CPUs: a step is told to all stages at once, and ends in the last.

    stage 0        c0 | c1 | c2 | c3
    stage 1             c0 | c1 | c2 | c3
    stage 2 (ours)           c0 | c1 | c2 | c3

The first rank launches a step by telling the others of it, which takes no time, and computes
its own share when the step is resolved; by then the stages before it are at later chunks.
Every rank has the same block tables, so a block id means the same place in each cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from base.clock import Clock
from base.errors import LostError
from engine.arrivals import PrefixArrivals, prefix_parts
from engine.batch import Batch, batch_from_numbers, batch_numbers, build_batch
from engine.layer_hooks import LayerHooks
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.pipeline import Stage, layers_of
from engine.ranks import Ranks
from engine.runner import run_batch
from engine.step import LayerGroup, StepPlan, StepResult, arrivals_of, loads_of


@dataclass(slots=True, eq=False)
class PipelinedStep:
    """A step that all stages were told of."""

    plan: StepPlan
    batch: Batch
    layer_groups: tuple[LayerGroup, ...]
    """Of each stage, in their order."""
    has_run: threading.Event
    """On this rank, or failed to."""
    is_broken: bool = True
    """Until it has run."""


class PipelineRunner:
    """Owns this rank's share of the model while a step runs. Belongs to the device thread.

    `launch` may be called while another thread is in `resolve`.

    Args:
        stage: That the model was cut to.
        stage_layers: Of each stage.
        ranks: The others, on the first.
    """

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
        stage.on_taken_in = self._begin
        self._hooks = LayerHooks(layers_of(model.module), 1)

    @property
    def num_steps_under_way(self) -> int:
        """One for each stage, and one that waits for the first: it never waits for the event loop."""
        return len(self._stage_layers) + 1

    @property
    def prefix_parts(self) -> tuple[int, ...]:
        """Of this rank's layers; every rank waits for its own."""
        return prefix_parts(self._hooks.num_layers)

    def launch(self, plan: StepPlan) -> PipelinedStep:
        """Have the stages before begin with a step."""
        assert self._ranks is not None, "the first rank launches"
        batch = build_batch(plan, self._cache.layout.block_size, self._model.device)
        step = PipelinedStep(plan, batch, (), threading.Event())
        self._ranks.tell(batch_numbers(batch), loads_of(plan))
        step.layer_groups = stage_groups(
            self._stage_layers, self._ranks, functools.partial(_wait_for_own, step)
        )
        return step

    def resolve(self, step: PipelinedStep) -> StepResult:
        """Run the last stage's share of a step, once the stages before have run theirs."""
        try:
            with self._hooks.waiting_for(arrivals_of(step.plan)):
                result = run_batch(self._model, self._cache, step.batch, step.plan)
            step.is_broken = False
            return replace(result, busy_s=self._clock.now_s() - self._began_s)
        finally:
            step.has_run.set()

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
    """Return when which layers of the step that was told of last are computed: stage by stage.

    Args:
        wait_for_own: For the first rank's share of it.
    """
    groups: list[LayerGroup] = []
    first = 0
    for stage, count in enumerate(stage_layers):
        of_stage = ranks.shape.ranks_of(stage)
        others = functools.partial(ranks.wait_ran, of_stage, ranks.num_told)
        wait = functools.partial(_wait_for_both, wait_for_own, others) if 0 in of_stage else others
        groups.append(LayerGroup(first, count, wait))
        first += count
    return tuple(groups)


def _wait_for_both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()


def _wait_for_own(step: PipelinedStep) -> None:
    step.has_run.wait()
    if step.is_broken:
        raise LostError("the step that this sequence was in failed; see the node's log")
