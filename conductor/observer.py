"""What is learned from requests as they run: metrics, corrections of the cost model, explanations."""

from __future__ import annotations

from base.messages import PrefillTimes
from base.metrics import ConductorMetrics
from base.request import RequestId
from conductor.cluster_view import ClusterView
from conductor.cost_model import CostModel
from conductor.decisions import Actual, Decision
from conductor.explain import Decisions
from conductor.placement import Placement, PlacementRequest


class Observer:
    """Is told by the dispatcher what was measured. Belongs to the event loop."""

    def __init__(
        self, metrics: ConductorMetrics, view: ClusterView, cost: CostModel, decisions: Decisions
    ) -> None:
        self._metrics = metrics
        self._view = view
        self._cost = cost
        self._decisions = decisions

    def decided(self, made: Decision) -> None:
        """Take in a decision, refusals included."""
        self._decisions.decided(made)

    def ended(self, request_id: RequestId, actual: Actual) -> None:
        """Take in how an attempt that was placed went."""
        self._decisions.ended(request_id, actual)

    def first_token(
        self, ttft_s: float, times: PrefillTimes, asked: PlacementRequest, placement: Placement
    ) -> None:
        """Take in a request's first token."""
        self._metrics.first_token(ttft_s, times)
        predicted_s = self._cost.prefill_s(
            asked.num_tokens - placement.matched_tokens, placement.matched_tokens
        )
        self._view.corrections.observe(placement.prefill_node, "prefill", predicted_s, times.compute_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Take in tokens that arrived together, `gap_s` after the one before them."""
        self._metrics.next_tokens(gap_s, num_tokens)
