"""Learns from requests as they run: metrics, corrections of the cost model, explanations."""

from __future__ import annotations

from base.clock import Clock
from base.messages import Prefilled
from base.metrics import ConductorMetrics
from base.request import RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision
from conductor.placing.explain import Decisions
from conductor.placing.learner import Learner
from conductor.placing.placement import Placement, PlacementRequest
from conductor.serving.dispatch import RequestObserver


class Observer(RequestObserver):
    """Learns from what the dispatcher decided and nodes measured. Belongs to the event loop."""

    def __init__(
        self,
        metrics: ConductorMetrics,
        view: ClusterView,
        cost: CostModel,
        decisions: Decisions,
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._decisions = decisions
        self._clock = clock
        self._learner = Learner(view, cost, clock.now_s())
        metrics.corrections.values = view.corrections.ratios

    def decided(self, made: Decision) -> None:
        self._decisions.decided(made)
        if isinstance(made.result, Placement):
            self._learner.placed(made.result, made.decided_at_s)
        else:
            self._learner.refused(made.decided_at_s)

    def first_token(
        self, ttft_s: float | None, prefilled: Prefilled, asked: PlacementRequest, placement: Placement
    ) -> None:
        times = prefilled.times
        self._learner.first_token(ttft_s, times, asked, placement, self._clock.now_s())
        if ttft_s is None or not asked.max_tokens:
            return
        self._metrics.first_token(ttft_s, times)
        observe = self._metrics.predicted
        observe("ttft", asked.waited_s + placement.predicted_ttft_s, ttft_s)
        observe("queue", max(placement.queue_s, placement.fetch_s), times.queue_s)
        observe("prefill", placement.prefill_s, times.compute_s)
        observe("handoff", placement.handoff_s, times.exposed_transfer_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        self._metrics.next_tokens(gap_s, num_tokens)

    def ended(self, attempt_id: RequestId, actual: Actual) -> None:
        self._decisions.ended(attempt_id, actual)
        placement = self._learner.ended(attempt_id, actual.mean_step_s, self._clock.now_s())
        if actual.mean_tbt_s:
            self._metrics.predicted("tbt", placement.predicted_tbt_s, actual.mean_tbt_s)
