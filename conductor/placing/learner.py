"""Learning: requests correct the cost model of their nodes as they run.

    placed -> first_token -> ended      for each attempt; `refused` where there was none

The live observer and replay report here alike. Nothing is kept of a node that has left: whoever lost it
may end after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from base.messages import PrefillTimes
from base.request import NodeId, RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CORRECTION_GAIN, CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prefill_pace import PrefillPace
from conductor.placing.prompt_share import share_beside_running

DOUBT_AFTER_S = 1.0
"""Seconds without anything learned while requests are refused, after which what is known may be wrong."""
DOUBT_HALF_LIFE_S = 0.7
"""Seconds in which doubt, once it has begun, halves what was learned."""

UNHEARD_S = 30.0
"""Seconds without a measurement of a node that halve the belief that it is slower than others.

Less where that comes from less than ten measurements."""


@dataclass(slots=True)
class _Running:
    placement: Placement
    prefill: NodeState
    decode: NodeState
    placed_at_s: float
    prompt_s_before: float
    """Seconds that prompts had had on its prefill node when it was placed."""
    first_at_s: float | None = None
    """When its first token came; None: it was not prefilled."""
    steps_before: float = 0.0
    """Steps that its decode node had taken by the profile when it joined."""
    prompts_before: int | None = None
    """Prompts that its decode node had been given when it joined; None: some were being computed."""

    def share(self, now_s: float) -> float:
        """Return the share of its prefill node's time that prompts had since it was placed."""
        passed_s = now_s - self.placed_at_s
        prompt_s = self.prefill.passed.prompt_s_at(now_s) - self.prompt_s_before
        return prompt_s / passed_s if passed_s > 0 else 1.0


class _Heard(NamedTuple):
    """Measurements of one term of a node."""

    node: NodeState
    at_s: float
    """When it was measured or doubted last."""
    number: int
    """Measurements so far."""


class Learner:
    """Teaches a view's `Corrections` by every attempt that is placed."""

    def __init__(self, view: ClusterView, cost: CostModel, now_s: float) -> None:
        self._view = view
        self._cost = cost
        self._pace = PrefillPace()
        self._running: dict[RequestId, _Running] = {}
        self._learned_at_s = self._doubted_at_s = now_s
        self._heard: dict[str, dict[NodeId, _Heard]] = {"prefill": {}, "handoff": {}, "decode": {}}
        """Measurements of each node, by term, the one that is looked at next first."""
        view.on_running = self._running_changed

    def placed(self, placement: Placement, now_s: float) -> None:
        """Take in an attempt that begins."""
        prefill, decode = self._view.node(placement.prefill_node), self._view.node(placement.decode_node)
        prompt_s = prefill.passed.prompt_s_at(now_s)
        self._running[placement.request_id] = _Running(placement, prefill, decode, now_s, prompt_s)
        self._pace.placed(placement.prefill_node, prompt_s)
        self._doubt_one(now_s, placement.prefill_node, "prefill")
        self._doubt_one(now_s, placement.prefill_node, "handoff")
        self._doubt_one(now_s, placement.decode_node, "decode")

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
        running.steps_before = running.decode.passed.steps_at(now_s)
        running.prompts_before = _num_prompts(running.decode)
        # those who decode there had their part of its seconds
        prompt_s = running.prefill.passed.prompt_s_at(now_s)
        paced = self._pace.done(node_id, prompt_s, profile_s, times.compute_s * running.share(now_s))
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
        placement, node, first_at_s = running.placement, running.decode, running.first_at_s
        num_steps = node.passed.steps_at(now_s) - running.steps_before
        had_none_beside = _num_prompts(node) == running.prompts_before is not None
        if first_at_s is None:
            self._pace.lost(placement.prefill_node, running.prefill.passed.prompt_s_at(now_s))
        elif mean_step_s and num_steps > 0 and had_none_beside:
            profile_s = (now_s - first_at_s) / num_steps
            self._learn(now_s, placement.decode_node, "decode", profile_s, mean_step_s)
        return placement

    def _running_changed(self, node: NodeState, now_s: float) -> None:
        """Take in that other sequences decode on a node from now on."""
        share = share_beside_running(node, node.tightest_running_s, self._cost)
        node.passed.change(now_s, node.running_step_s, share)

    def _learn(
        self, now_s: float, node_id: NodeId, term: str, profile_s: float, measured_s: float, count: int = 1
    ) -> None:
        if not self._view.is_member(node_id):
            return
        self._view.corrections.observe(node_id, term, profile_s, measured_s, count)
        node, before = self._view.node(node_id), self._heard[term].get(node_id)
        number = before.number if before is not None and before.node is node else 0
        self._heard[term][node_id] = _Heard(node, now_s, number + 1)

    def _doubt_one(self, now_s: float, chosen: NodeId, term: str) -> None:
        """Doubt that a node which was not measured for long is slower than one that was chosen now.

        Who believes it sends nothing there, and would believe it for ever: after a cold start, for example.
        What few measurements said is doubted sooner. One that has prompts will be measured when they are
        done, and one that decodes when a sequence ends. Nodes are looked at in turn, one for each request.
        """
        heard = self._heard[term]
        node_id = next(iter(heard), None)
        if node_id is None:
            return
        known = heard.pop(node_id)
        node = known.node
        if not node.is_member:
            return
        if now_s - known.at_s >= UNHEARD_S * min(1.0, CORRECTION_GAIN * known.number):
            known = known._replace(at_s=now_s)
            decodes = term == "decode" and node.decode_sequences > node.foreign_sequences
            if not (node.num_queued or decodes):
                self._view.corrections.doubt(node_id, chosen, term)
        heard[node_id] = known


def _num_prompts(node: NodeState) -> int | None:
    """Return how many prompts a node has been given; None: it has some of them yet, or has left."""
    return node.num_prompts if node.is_member and not node.num_queued else None
