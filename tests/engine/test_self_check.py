"""A model whose steps say something else than its family does is not served."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from base.errors import ConfigError
from engine.batch import build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.self_check import (
    CHECKED_CHUNKS,
    checked_blocks,
    eager_logits,
    require_faithful,
    require_right_kernels,
)
from engine.step import StepPlan
from tests.engine.test_gpu_model import make_family

Spoil = Callable[[StepPlan, torch.Tensor], torch.Tensor]


class Steps:
    """Steps of a model on a CPU, of which some may be spoilt."""

    def __init__(self, spoil: Spoil = lambda plan, logits: logits) -> None:
        self.model = PagedModel(make_family("llama"))
        self.layout = replace(self.model.shape, block_size=16)
        self.expected = eager_logits(self.model)
        self.plans: list[StepPlan] = []
        self._cache = PagedCache(self.layout, checked_blocks(self.layout), torch.device("cpu"))
        self._spoil = spoil

    def logits_of(self, plan: StepPlan) -> torch.Tensor:
        self.plans.append(plan)
        logits = self.model.forward(build_batch(plan, 16, torch.device("cpu")), self._cache)
        return self._spoil(plan, logits)

    def check(self, max_batch: int = 8) -> float:
        return require_right_kernels(self.model, self.layout, self.expected, self.logits_of, max_batch)


def test_right_steps_of_one_and_of_two_sequences_pass() -> None:
    steps = Steps()
    assert steps.check() < 1e-4
    sizes = [[entry.num_tokens for entry in plan.entries] for plan in steps.plans]
    assert sizes == [[size] * count for size in CHECKED_CHUNKS for count in (1, 2)]
    assert [plan.num_single for plan in steps.plans] == [0, 0, 0, 0, 1, 2]
    tables = [entry.block_table for entry in steps.plans[-1].entries]
    assert sorted(block for table in tables for block in table) == list(range(checked_blocks(steps.layout)))


def test_an_engine_of_one_sequence_is_checked_with_one() -> None:
    steps = Steps()
    steps.check(max_batch=1)
    assert all(len(plan.entries) == 1 for plan in steps.plans)


@pytest.mark.parametrize("what", ["no number", "another token's"])
@pytest.mark.parametrize("step", range(len(CHECKED_CHUNKS)))
@pytest.mark.parametrize("row", [0, 1])
def test_one_wrong_row_of_any_step_is_found(step: int, row: int, what: str) -> None:
    def spoil(plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        if plan.entries[0].num_tokens == CHECKED_CHUNKS[step] and len(plan.entries) == 2:
            logits[row] = float("nan") if what == "no number" else logits[row].roll(1)
        return logits

    with pytest.raises(ConfigError, match=r"on this GPU.* off by (nan|[01])"):
        Steps(spoil).check()


def test_what_is_no_number_in_a_late_step_is_found_on_every_device(monkeypatch) -> None:
    steps = Steps()
    forward = steps.model.forward

    def spoilt(batch, cache: PagedCache) -> torch.Tensor:
        logits = forward(batch, cache)
        return logits * float("nan") if batch.shape.num_single else logits

    monkeypatch.setattr(steps.model, "forward", spoilt)
    with pytest.raises(ConfigError, match="off by nan"):
        require_faithful(steps.model, steps.layout, steps.expected)
