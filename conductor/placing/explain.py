"""Explanations: why a request went where it went, and whether it went as predicted.

The last `MAX_KEPT` decisions are kept in memory. What is shown of one is worked out when it
is asked for, from the recorded decision by the scheduler's own functions: keeping costs a
request little, and an explanation cannot differ from what was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from base.request import NodeId, RequestId
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import decision_to
from conductor.placing.decisions import Actual, Decision, NodeSeen, decide_again, view_of
from conductor.placing.placement import Placement
from conductor.placing.prefill_policies import PrefillComparison
from conductor.placing.scheduler import tokens_needed
from conductor.placing.scheduler_settings import SchedulerSettings

MAX_KEPT = 1024
"""A decision of 16 nodes and 30 blocks takes some 6 KB."""

MAX_LISTED = 100

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
"""Beginnings of the ids that HTTP clients see."""


class DecisionWriter(Protocol):
    """Keeps decisions and outcomes for longer than memory does: `serving/decision_log.py`."""

    def decision(self, made: Decision) -> None: ...

    def outcome(self, request_id: RequestId, actual: Actual) -> None: ...


@dataclass(slots=True)
class _KeptDecision:
    made: Decision
    actual: Actual | None = None


class Decisions:
    """The last decisions and how they went. Owned by the event loop."""

    def __init__(
        self,
        cost: CostModel,
        settings: SchedulerSettings,
        decision_log: DecisionWriter | None = None,
        max_kept: int = MAX_KEPT,
    ) -> None:
        self._cost = cost
        self._settings = settings
        self._log = decision_log
        self._max_kept = max_kept
        self._kept: dict[RequestId, _KeptDecision] = {}

    def decided(self, made: Decision) -> None:
        """Keep a decision, and forget the oldest where there are too many."""
        self._kept[made.asked.request_id] = _KeptDecision(made)
        if len(self._kept) > self._max_kept:
            del self._kept[next(iter(self._kept))]
        if self._log is not None:
            self._log.decision(made)

    def ended(self, request_id: RequestId, actual: Actual) -> None:
        """Say how a placed attempt went."""
        if kept := self._kept.get(request_id):
            kept.actual = actual
        if self._log is not None:
            self._log.outcome(request_id, actual)

    def explain(self, name: str) -> dict[str, Any] | None:
        """Return, for JSON, all attempts of a request that are remembered; None: there are none.

        `name` is the id that the client has (with or without `chatcmpl-`), a node's name of
        the request, or any beginning of it that ends before a `-` or `.`.
        """
        for prefix in ANSWER_PREFIXES:
            name = name.removeprefix(prefix)
        starts = (f"{name}-", f"{name}.")
        found = [
            kept
            for request_id, kept in self._kept.items()
            if request_id == name or request_id.startswith(starts)
        ]
        if not found:
            return None
        return {"request_id": name, "attempts": [self._explained(kept) for kept in found]}

    def recent(self, now_s: float) -> list[dict[str, Any]]:
        """Return, for JSON, the last `MAX_LISTED` attempts, newest first; `now_s` on their clock."""
        newest = islice(reversed(self._kept.values()), MAX_LISTED)
        return [_listed(kept.made, kept.actual, now_s) for kept in newest]

    def _explained(self, kept: _KeptDecision) -> dict[str, Any]:
        made, actual = kept.made, kept.actual
        shown = decision_to(made)
        del shown["seen"], shown["kind"], shown["asked"]["chain"], shown["asked"]["request_id"]
        shown["waited_s"] = made.decided_at_s - made.arrived_at_s
        if made.seen.nodes is not None:
            shown["prefill_candidates"] = _prefill_candidates(
                made, made.seen.nodes, self._cost, self._settings
            )
            shown["decode_candidates"] = _decode_candidates(made, made.seen.nodes, self._cost)
            shown["runner_up"] = _runner_up(shown["prefill_candidates"], made)
            shown["decided_again_alike"] = decide_again(made, self._cost, self._settings) == made.result
        if actual is not None:
            shown["actual"] = actual._asdict()
            if isinstance(made.result, Placement):
                shown["predicted_over_actual"] = _compared(made, made.result, actual)
        return shown


def _listed(made: Decision, actual: Actual | None, now_s: float) -> dict[str, Any]:
    """Return one attempt as a row: `state` is running, a rejection's reason, or how it ended."""
    shown: dict[str, Any] = {
        "request_id": made.asked.request_id,
        "age_s": now_s - made.arrived_at_s,
        "num_tokens": made.asked.num_tokens,
    }
    if not isinstance(made.result, Placement):
        return shown | {"state": f"rejected: {made.result.reason.value}"}
    waited_s = made.decided_at_s - made.arrived_at_s
    shown |= {
        "state": "running",
        "prefill_node": made.result.prefill_node,
        "decode_node": made.result.decode_node,
        "source_node": made.result.source_node,
        "predicted_ttft_s": waited_s + made.result.predicted_ttft_s,
    }
    if actual is not None:
        shown |= {
            "state": actual.end,
            "ttft_s": actual.ttft_s,
            "mean_tbt_s": actual.mean_tbt_s,
            "num_cached_tokens": actual.num_cached_tokens,
            "num_output_tokens": actual.num_output_tokens,
        }
    return shown


def _prefill_candidates(
    made: Decision, nodes: tuple[NodeSeen, ...], cost: CostModel, settings: SchedulerSettings
) -> list[dict[str, Any]]:
    """Return what each node that could prefill would have taken, the least first, those to avoid last."""
    view = view_of(made, cost)
    groups = view.index.match(made.asked.chain)
    known = PrefillComparison(made.asked, groups, view, cost, settings, made.decided_at_s)
    choices = [
        (node, known.choice(view.node(node.node_id).slot, node.matched_blocks))
        for node in nodes
        if node.prefills
    ]
    avoid = made.asked.avoid
    choices.sort(key=lambda pair: (pair[0].node_id in avoid, pair[1].cost_s, pair[1].slot))
    return [
        {
            "node": node.node_id,
            "local_blocks": choice.local_blocks,
            "matched_blocks": choice.matched_blocks,
            "fetch_from": None
            if choice.source_slot is None
            else view.node_at(choice.source_slot).info.node_id,
            "queue_s": choice.queue_s,
            "fetch_s": choice.fetch_s,
            "prefill_s": choice.prefill_s,
            "prefill_ratio": node.prefill_ratio,
            "ready_s": choice.ready_s,
            "others_s": choice.cost_s - choice.ready_s,
            "is_avoided": node.node_id in avoid,
        }
        for node, choice in choices
    ]


def _decode_candidates(made: Decision, nodes: tuple[NodeSeen, ...], cost: CostModel) -> list[dict[str, Any]]:
    """Return the nodes that could decode, shortest predicted step first."""
    needed = tokens_needed(made.asked, view_of(made, cost))
    return [
        {
            "node": node.node_id,
            "matched_blocks": node.matched_blocks,
            "tbt_s": cost.decode_step_s(
                node.decode_sequences + 1, node.decode_context_tokens + made.asked.num_tokens
            ),
            "sequences": node.decode_sequences,
            "free_tokens": node.free_tokens,
            "fits": node.free_tokens >= needed,
            "is_avoided": node.node_id in made.asked.avoid,
        }
        for node in sorted(nodes, key=lambda node: node.step_s)
        if node.decodes
    ]


def _runner_up(candidates: list[dict[str, Any]], made: Decision) -> NodeId | None:
    chosen = made.result.prefill_node if isinstance(made.result, Placement) else None
    others: list[NodeId] = [row["node"] for row in candidates if row["node"] != chosen]
    return others[0] if others else None


def _compared(made: Decision, placement: Placement, actual: Actual) -> dict[str, float | None]:
    """Return predicted over actual: 1 is right, 2 twice too long."""
    waited_s = made.decided_at_s - made.arrived_at_s
    return {
        "ttft": _ratio(waited_s + placement.predicted_ttft_s, actual.ttft_s),
        "prefill": _ratio(placement.prefill_s, actual.compute_s),
        "tbt": _ratio(placement.predicted_tbt_s, actual.mean_tbt_s),
    }


def _ratio(predicted_s: float, actual_s: float | None) -> float | None:
    return predicted_s / actual_s if actual_s else None
