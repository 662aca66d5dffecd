"""Runner: one step on the device. Plan in, tokens out.

Called by the device thread alone (`engine/loop.py`), so nothing in here is shared.
"""

from __future__ import annotations

from engine.batch import build_batch
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.sampler import sample
from engine.step import StepPlan, StepResult


class Runner:
    """Owns the model and the cache while a step runs."""

    def __init__(self, model: PagedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV, and sample where the plan says so."""
        batch = build_batch(plan, self._cache.layout.block_size, self._model.device)
        logits = self._model.forward(batch, self._cache)
        sampling = [entry.sequence for entry in plan.entries if entry.samples]
        tokens = iter(sample(logits, sampling))
        return StepResult(tuple(next(tokens) if entry.samples else None for entry in plan.entries))
