"""The budgets of nodes: how much each has used up of what admission lets it take.

    queue    its queue of prompts, of the seconds that a prompt may wait and be in time: the bound on TTFT as
             admission has it, less what a prompt takes to compute
    step     its next decode step: how far it is from a step of one sequence to the longest that admission
             lets it grow to
    kv       its KV blocks that requests hold

An idle node has used up nothing, and near 100 % requests are rejected. Seconds over a bound say neither: a
step of one sequence may be half of its bound, and a queue of two thirds of one leaves a prompt no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import NamedTuple

from base.config import SloConfig
from base.request import Slo
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Decision
from conductor.placing.placement import Rejection
from conductor.placing.refused import lacking, limits_of
from conductor.placing.scheduler_settings import SchedulerSettings

BUDGETS = ("queue", "step", "kv")
"""The budgets by their numbers, as the first columns of a node's row: `history.NODE_SERIES`."""

LEAST_ROOM = 0.2
"""Share of the bound on TTFT that a queue may have, however long prompts take to compute."""
GAIN = 0.05
"""The weight of the latest prompt in the seconds that one takes."""


class Limits(NamedTuple):
    """The budgets of a node. Seconds; infinity: unbounded."""

    queue_s: float
    step_least_s: float
    """A step of one sequence."""
    step_s: float

    def shares(self, values: Sequence[float]) -> list[float]:
        """Return the share of each budget that a node's row has used up: NaN where it has no such budget."""
        queue_s, step_s, held, *_ = values
        over_s = max(step_s, self.step_least_s) - self.step_least_s  # NaN stays NaN
        return [
            queue_s / self.queue_s if self.queue_s < inf else nan,
            over_s / (self.step_s - self.step_least_s) if self.step_s < inf else nan,
            held,
        ]


class Budgets:
    """The limits of one configuration, which prompts teach how long they take. Belongs to the event loop."""

    def __init__(self, slo: SloConfig, cost: CostModel, settings: SchedulerSettings) -> None:
        asked = Slo(slo.ttft_s or inf, slo.tbt_s or inf)
        self._ttft_s, self._step_s = limits_of(asked, settings, cost)
        self._cost, self._settings = cost, settings
        self._least_s = cost.decode_step_s(1, 0)
        if self._step_s <= self._least_s:
            self._least_s = 0.0
        self._prompt_s: float | None = None

    def computed(self, seconds: float) -> None:
        """Take in what a prompt took to compute."""
        before = seconds if self._prompt_s is None else self._prompt_s
        self._prompt_s = before + GAIN * (seconds - before)

    def lacked(self, made: Decision, view: ClusterView) -> str | None:
        """Return what a request lacked that was rejected, one of `refused.LACKS`; None: it was placed."""
        if not isinstance(made.result, Rejection):
            return None
        computing_s = view.computing_s(made.asked.chain, made.asked.num_tokens)
        return lacking(made.asked, made.result.reason, computing_s, self._cost, self._settings)

    @property
    def limits(self) -> Limits:
        prompt_s = min(self._prompt_s or 0.0, (1.0 - LEAST_ROOM) * self._ttft_s)
        return Limits(self._ttft_s - prompt_s, self._least_s, self._step_s)
