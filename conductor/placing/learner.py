"""Learning: requests correct the cost model of their nodes as they run.

    placed -> first_token -> ended      for each attempt; `refused` where there was none

The live observer and replay report here alike. Nothing is kept of a node that has left: whoever lost it
may end after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from base.messages import PrefillTimes
from base.request import NodeId, RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prefill_pace import PrefillPace

DOUBT_AFTER_S = 1.0
"""Seconds without anything learned while requests are refused, after which what is known may be wrong."""
DOUBT_HALF_LIFE_S = 0.7
"""Seconds in which doubt, once it has begun, halves what was learned."""

UNHEARD_S = 30.0
"""Seconds without a measurement of a node that halve the belief that it is slower than others."""


@dataclass(slots=True)
class _Running:
    placement: Placement
    first_at_s: float | None = None
    """When its first token came; None: it was not prefilled."""
    steps_before: float = 0.0
    """Steps that its decode node had taken by the profile when it joined."""
    prompts_before: int | None = None
    """Prompts that its decode node had been given when it joined; None: some were being computed."""


@dataclass(slots=True)
class _Steps:
    """The steps that one node takes by the profile, while those decode who decode."""

    at_s: float
    """When those who decode last changed."""
    count: float = 0.0
    """Number of steps until then."""
    step_s: float = 0.0
    """Seconds of a step since then; 0: not known."""


class Learner:
    """Teaches a view's `Corrections` by every attempt that is placed."""

    def __init__(self, view: ClusterView, cost: CostModel, now_s: float) -> None:
        self._view = view
        self._cost = cost
        self._pace = PrefillPace()
        self._running: dict[RequestId, _Running] = {}
        self._steps: dict[NodeId, _Steps] = {}
        self._learned_at_s = self._doubted_at_s = now_s
        self._heard_at_s: dict[str, dict[NodeId, float]] = {}
        """When each node was measured or doubted, by term, the longest ago first."""

    def placed(self, placement: Placement, now_s: float) -> None:
        """Take in an attempt that begins."""
        self._running[placement.request_id] = _Running(placement)
        self._pace.placed(placement.prefill_node, now_s)

    def refused(self, now_s: float) -> None:
        """Believe what was learned less, where a node is idle and nothing is learned.

        After a stall of the machine every prediction may be past every bound, and a request that is never
        placed teaches nothing.
        """
        view = self._view
        since_s = max(self._doubted_at_s, self._learned_at_s + DOUBT_AFTER_S)
        slot = view.prefill_order.least(view.prefill_mask)
        if now_s > since_s and slot is not None and not view.members[slot].num_queued:
            view.corrections.relax(0.5 ** ((now_s - since_s) / DOUBT_HALF_LIFE_S))
            self._doubted_at_s = now_s

    def first_token(
        self,
        ttft_s: float | None,
        times: PrefillTimes,
        asked: PlacementRequest,
        placement: Placement,
        now_s: float,
    ) -> None:
        """Take in an attempt's first token, after its view; `ttft_s` is None where it had one before."""
        self._learned_at_s = now_s
        node_id, new_tokens = placement.prefill_node, asked.num_tokens - placement.matched_tokens
        profile_s = self._cost.prefill_s(new_tokens, placement.matched_tokens)
        running = self._running[asked.request_id]
        running.first_at_s = now_s
        running.steps_before = self._num_steps(placement.decode_node, now_s)
        running.prompts_before = self._num_prompts(placement.decode_node)
        # those who decode there have their part of its seconds: what is off is the rest
        paced = self._pace.done(node_id, now_s, profile_s / placement.prompt_share, times.compute_s)
        if paced is not None:
            self._learn(now_s, node_id, "prefill", *paced)
        if placement.handoff_s:
            tokens = asked.num_tokens - placement.decode_matched_blocks * self._view.block_size
            profile_s = self._cost.handoff_s(tokens, placement.prefill_s)
            self._learn(now_s, node_id, "handoff", profile_s, times.exposed_transfer_s)
        if ttft_s is not None and self._view.is_member(node_id):
            known_s = asked.waited_s + times.queue_s + times.compute_s + times.exposed_transfer_s
            self._view.corrections.observe_added(node_id, max(0.0, ttft_s - known_s))

    def ended(self, request_id: RequestId, mean_step_s: float | None, now_s: float) -> Placement:
        """Take in that an attempt is over, and has left the view, and how long a token after the second took.

        The second token comes after messages and the wait for a step to join: of a short answer that is more
        than its steps take, and would have the node look slower than it is.

        What a step was to take is the mean over all batches that it was in: load may double and fall again
        while it decodes. Gaps with steps that computed prompts too say how long the node let them be, by its
        budgets, and nothing of a step.
        """
        running = self._running.pop(request_id)
        placement = running.placement
        node_id, first_at_s = placement.decode_node, running.first_at_s
        num_steps = self._num_steps(node_id, now_s) - running.steps_before
        had_none_beside = self._num_prompts(node_id) == running.prompts_before is not None
        if first_at_s is None:
            self._pace.lost(placement.prefill_node, now_s)
        elif mean_step_s and num_steps > 0 and had_none_beside:
            self._learn(now_s, node_id, "decode", (now_s - first_at_s) / num_steps, mean_step_s)
        return placement

    def _num_prompts(self, node_id: NodeId) -> int | None:
        """Return how many prompts a node has been given; None: it has some of them yet, or has left."""
        if not self._view.is_member(node_id):
            return None
        node = self._view.node(node_id)
        return None if node.num_queued else node.num_prompts

    def _num_steps(self, node_id: NodeId, now_s: float) -> float:
        """Count the steps that a node took by the profile until now, and return how many there were in all.

        To be called after each change of those who decode there: the next steps are theirs.
        """
        if not self._view.is_member(node_id):
            self._steps.pop(node_id, None)
            return 0.0
        node, steps = self._view.node(node_id), self._steps.setdefault(node_id, _Steps(now_s))
        if steps.step_s:
            steps.count += (now_s - steps.at_s) / steps.step_s
        steps.at_s = now_s
        steps.step_s = self._cost.decode_step_s(node.running_sequences, node.running_context_tokens)
        return steps.count

    def _learn(
        self, now_s: float, node_id: NodeId, term: str, profile_s: float, measured_s: float, count: int = 1
    ) -> None:
        if not self._view.is_member(node_id):
            return
        self._view.corrections.observe(node_id, term, profile_s, measured_s, count)
        heard_at_s = self._heard_at_s.setdefault(term, {})
        heard_at_s.pop(node_id, None)
        heard_at_s[node_id] = now_s
        self._doubt_one(now_s, node_id, term, heard_at_s)

    def _doubt_one(self, now_s: float, node_id: NodeId, term: str, heard_at_s: dict[NodeId, float]) -> None:
        """Doubt that a node which was not measured for long is slower than one that was measured now.

        Who believes it sends nothing there, and would believe it for ever: after a cold start, for example.
        One that has prompts will be measured when they are done.
        """
        oldest = next(iter(heard_at_s))
        if now_s - heard_at_s[oldest] < UNHEARD_S:
            return
        del heard_at_s[oldest]
        if self._view.is_member(oldest):
            if not self._view.node(oldest).num_queued:
                self._view.corrections.doubt(oldest, node_id, term)
            heard_at_s[oldest] = now_s
