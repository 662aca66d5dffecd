"""What is learned from requests as they run: metrics, corrections of the cost model, explanations."""

from __future__ import annotations

from base.clock import Clock
from base.messages import PrefillTimes
from base.metrics import ConductorMetrics
from base.request import NodeId, RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision
from conductor.placing.explain import Decisions
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prefill_pace import PrefillPace


class _Running:
    __slots__ = ("is_prefilled", "placement", "profile_step_s")

    def __init__(self, placement: Placement, profile_step_s: float) -> None:
        self.placement = placement
        self.profile_step_s = profile_step_s
        """Of decode, without what was learned."""
        self.is_prefilled = False


class Observer:
    """Is told by the dispatcher what was decided and measured. Belongs to the event loop."""

    def __init__(
        self,
        metrics: ConductorMetrics,
        view: ClusterView,
        cost: CostModel,
        decisions: Decisions,
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._view = view
        self._cost = cost
        self._decisions = decisions
        self._clock = clock
        self._pace = PrefillPace()
        self._placed: dict[RequestId, _Running] = {}
        metrics.corrections.values = view.corrections.ratios

    def decided(self, made: Decision) -> None:
        """Take in a decision, refusals included."""
        self._decisions.decided(made)
        if isinstance(made.result, Placement):
            ratio = self._view.corrections.ratio(made.result.decode_node, "decode")
            self._placed[made.asked.request_id] = _Running(made.result, made.result.predicted_tbt_s / ratio)
            self._pace.placed(made.result.prefill_node, made.decided_at_s)

    def first_token(
        self, ttft_s: float | None, times: PrefillTimes, asked: PlacementRequest, placement: Placement
    ) -> None:
        """Take in an attempt's first token; `ttft_s` is None where the request had one before."""
        node_id, new_tokens = placement.prefill_node, asked.num_tokens - placement.matched_tokens
        profile_s = self._cost.prefill_s(new_tokens, placement.matched_tokens)
        self._placed[asked.request_id].is_prefilled = True
        paced = self._pace.done(node_id, self._clock.now_s(), profile_s, times.compute_s)
        if paced is not None:
            self._learn(node_id, "prefill", *paced)
        if placement.handoff_s:
            tokens = asked.num_tokens - placement.decode_matched_blocks * self._view.block_size
            profile_s = self._cost.handoff_s(tokens, placement.prefill_s)
            self._learn(node_id, "handoff", profile_s, times.exposed_transfer_s)
        if ttft_s is None:
            return
        self._metrics.first_token(ttft_s, times)
        known_s = asked.waited_s + times.queue_s + times.compute_s + times.exposed_transfer_s
        if self._view.is_member(node_id):
            self._view.corrections.observe_added(node_id, max(0.0, ttft_s - known_s))
        observe = self._metrics.predicted
        observe("ttft", asked.waited_s + placement.predicted_ttft_s, ttft_s)
        observe("queue", max(placement.queue_s, placement.fetch_s), times.queue_s)
        observe("prefill", placement.prefill_s, times.compute_s)
        observe("handoff", placement.handoff_s, times.exposed_transfer_s)

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """Take in tokens that arrived together, `gap_s` after the one before them."""
        self._metrics.next_tokens(gap_s, num_tokens)

    def ended(self, request_id: RequestId, actual: Actual) -> None:
        """Take in how an attempt that was placed went."""
        self._decisions.ended(request_id, actual)
        running = self._placed.pop(request_id)
        if not running.is_prefilled:
            self._pace.lost(running.placement.prefill_node, self._clock.now_s())
        if actual.mean_tbt_s:
            self._learn(running.placement.decode_node, "decode", running.profile_step_s, actual.mean_tbt_s)
            self._metrics.predicted("tbt", running.placement.predicted_tbt_s, actual.mean_tbt_s)

    def _learn(self, node_id: NodeId, term: str, profile_s: float, measured_s: float, count: int = 1) -> None:
        # of a node that has left nothing is kept: whoever lost it may end after it
        if self._view.is_member(node_id):
            self._view.corrections.observe(node_id, term, profile_s, measured_s, count)
