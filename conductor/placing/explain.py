"""Explanations: why a request went where it went, and whether it went as predicted.

The last `MAX_KEPT` decisions are kept in memory, and for an hour those that somebody will ask about: the
slowest, those that missed a bound, those that were rejected, `MAX_NOTABLE` of each at least. What is shown of
one is worked out when it is asked for, from the recorded decision by the scheduler's own functions: keeping
costs a request little, and an explanation cannot differ from what was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from math import inf
from typing import Any, Protocol

from base.request import NodeId, RequestId, finite_or_none
from conductor.placing.cost_model import CostModel
from conductor.placing.decision_lines import decision_to
from conductor.placing.decisions import Actual, Decision, NodeSeen, decide_again, view_of
from conductor.placing.inline_prefill import beside_decoding
from conductor.placing.placement import Placement
from conductor.placing.prefill_policies import compared
from conductor.placing.refused import judged, would_be
from conductor.placing.scheduler import tokens_needed
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.placing.waterfall import waterfall

MAX_KEPT = 1024
"""A decision of 16 nodes and 30 blocks takes some 6 KB."""

MAX_RUNNING = 1_024
"""Decisions older than all of those whose attempts run yet: how they end, nobody knows before."""

MAX_NOTABLE = 100
NOTABLE_S = 3_600.0
"""Seconds for which a slow, late or rejected one is worth its place."""

MAX_LISTED = 100
LISTS = ("latest", "slowest", "missed", "rejected")

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""Beginnings of the ids that HTTP clients see."""


class DecisionWriter(Protocol):
    """Keeps decisions and outcomes for longer than memory does: `serving/decision_log.py`."""

    def decision(self, made: Decision) -> None: ...

    def outcome(self, request_id: RequestId, actual: Actual) -> None: ...


@dataclass(slots=True)
class _KeptDecision:
    made: Decision
    actual: Actual | None = None

    @property
    def is_rejected(self) -> bool:
        return not isinstance(self.made.result, Placement)

    @property
    def ttft_s(self) -> float:
        return (self.actual and self.actual.ttft_s) or 0.0

    def lists(self) -> tuple[str, ...]:
        """Return those of `LISTS` that it is in, however old it is."""
        if self.is_rejected:
            return ("rejected",)
        if self.actual is None:
            return ()
        ttft_s, (ttft_slo_s, tbt_slo_s, _) = self.ttft_s, self.made.asked.slo
        has_missed = ttft_s > ttft_slo_s or (self.actual.mean_tbt_s or 0.0) > tbt_slo_s
        return (*(("slowest",) if ttft_s > 0.0 else ()), *(("missed",) if has_missed else ()))


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
        self._notable: dict[str, dict[RequestId, _KeptDecision]] = {name: {} for name in LISTS[1:]}
        """Decisions that are older than all of `_kept`, by why they are kept."""
        self._running: dict[RequestId, _KeptDecision] = {}

    def decided(self, made: Decision) -> None:
        """Keep a decision, and forget the oldest where there are too many."""
        self._kept[made.asked.request_id] = _KeptDecision(made)
        if len(self._kept) > self._max_kept:
            oldest = next(iter(self._kept))
            self._set_aside(oldest, self._kept.pop(oldest))
        if self._log is not None:
            self._log.decision(made)

    def ended(self, request_id: RequestId, actual: Actual) -> None:
        """Say how a placed attempt went."""
        if kept := self._kept.get(request_id):
            kept.actual = actual
        elif kept := self._running.pop(request_id, None):
            kept.actual = actual
            self._set_aside(request_id, kept)
        if self._log is not None:
            self._log.outcome(request_id, actual)

    def explain(self, name: str) -> dict[str, Any] | None:
        """Return, for JSON, all attempts of a request that are remembered; None: there are none.

        `name` is the id that the client has (with or without `chatcmpl-`), a node's name of
        the request, or any beginning of it that ends before a `-` or `.`.
        """
        for prefix in ANSWER_PREFIXES:
            name = name.removeprefix(prefix)
        if not name:
            return None
        starts = (f"{name}-", f"{name}.")
        known = self._running | self._kept
        for notable in self._notable.values():
            known |= notable
        found = [
            kept for request_id, kept in known.items() if request_id == name or request_id.startswith(starts)
        ]
        if not found:
            return None
        found.sort(key=lambda kept: kept.made.decided_at_s)
        begun_at_s = [kept.made.arrived_at_s for kept in found]
        for number, before in enumerate(found[:-1], 1):
            # choices of one answer are requests of their own, side by side
            if before.actual is not None and _is_next(before.made, found[number].made):
                begun_at_s[number] = before.actual.ended_at_s
        attempts = [self._explained(*each) for each in zip(found, begun_at_s, strict=True)]
        return {"request_id": name, "attempts": attempts}

    def recent(self, now_s: float, kind: str = "latest") -> list[dict[str, Any]]:
        """Return, for JSON, `MAX_LISTED` attempts at most; `now_s` on their clock.

        Args:
            kind: One of `LISTS`: the newest; those with the longest TTFT, the longest first; those that
                missed a bound or were rejected, the newest first.
        """
        if kind == "latest":
            chosen = [*islice(reversed(self._kept.values()), MAX_LISTED)]
        else:
            since_s = now_s - NOTABLE_S
            aside = (kept for kept in self._notable[kind].values() if kept.made.decided_at_s > since_s)
            chosen = [*aside, *(kept for kept in self._kept.values() if kind in kept.lists())]
            is_slowest = kind == "slowest"
            chosen.sort(key=lambda kept: -(kept.ttft_s if is_slowest else kept.made.decided_at_s))
        return [_listed(kept.made, kept.actual, now_s) for kept in chosen[:MAX_LISTED]]

    def _set_aside(self, request_id: RequestId, kept: _KeptDecision) -> None:
        """Keep a decision that leaves `_kept` if it is notable or may become so; forget what no more is."""
        if kept.actual is None and not kept.is_rejected:
            self._running[request_id] = kept
            if len(self._running) > MAX_RUNNING:
                del self._running[next(iter(self._running))]
            return
        now_s = kept.made.decided_at_s
        for kind in kept.lists():
            notable = self._notable[kind]
            notable[request_id] = kept
            while (oldest := next(iter(notable.items())))[1].made.decided_at_s <= now_s - NOTABLE_S:
                del notable[oldest[0]]
            if len(notable) > 2 * MAX_NOTABLE:
                self._notable[kind] = _most_notable(kind, notable)

    def _explained(self, kept: _KeptDecision, begun_at_s: float) -> dict[str, Any]:
        """Return one attempt, which began to wait at `begun_at_s`."""
        made, actual = kept.made, kept.actual
        shown = decision_to(made)
        del shown["seen"], shown["kind"], shown["asked"]["chain"], shown["asked"]["request_id"]
        shown["waited_s"] = made.decided_at_s - made.arrived_at_s
        shown["begun_s"] = begun_at_s - made.arrived_at_s
        instead = would_be(made, self._cost, self._settings)
        if instead is not None:
            shown["judged"] = judged(made, instead, self._cost, self._settings)._asdict()
        shown["parts"] = [part._asdict() for part in waterfall(made, actual, begun_at_s, instead)]
        if made.seen.nodes is not None:
            shown["prefill_candidates"] = _prefill_candidates(
                made, made.seen.nodes, self._cost, self._settings
            )
            decodes = made.asked.max_tokens > 0
            shown["decode_candidates"] = (
                _decode_candidates(made, made.seen.nodes, self._cost, self._settings) if decodes else []
            )
            shown["runner_up"] = _runner_up(shown["prefill_candidates"], made)
            shown["decided_again_alike"] = decide_again(made, self._cost, self._settings) == made.result
        if actual is not None:
            shown["actual"] = actual._asdict()
            if isinstance(made.result, Placement):
                shown["predicted_over_actual"] = _compared(made, made.result, actual)
        return shown


def _most_notable(kind: str, notable: dict[RequestId, _KeptDecision]) -> dict[RequestId, _KeptDecision]:
    """Return the `MAX_NOTABLE` slowest, or the newest of another kind, the oldest first."""
    kept = list(notable.values())[-MAX_NOTABLE:]
    if kind == "slowest":
        kept = nlargest(MAX_NOTABLE, notable.values(), key=lambda each: each.ttft_s)
    names = {each.made.asked.request_id for each in kept}
    return {name: each for name, each in notable.items() if name in names}


def _is_next(before: Decision, made: Decision) -> bool:
    """Return whether a decision is of the same request as one before it."""
    return before.asked.request_id.rpartition(".")[0] == made.asked.request_id.rpartition(".")[0]


def _listed(made: Decision, actual: Actual | None, now_s: float) -> dict[str, Any]:
    """Return one attempt as a row: `state` is running, a rejection's reason, or how it ended."""
    shown: dict[str, Any] = {
        "request_id": made.asked.request_id,
        "age_s": now_s - made.arrived_at_s,
        "num_tokens": made.asked.num_tokens,
        "ttft_slo_s": finite_or_none(made.asked.slo.ttft_slo_s),
        "tbt_slo_s": finite_or_none(made.asked.slo.tbt_slo_s),
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
    rest = groups, view, cost, settings, made.decided_at_s
    choices = [
        (node, compared(made.asked, view.node(node.node_id).slot, node.matched_blocks, *rest))
        for node in nodes
        if node.prefills
    ]
    avoid = made.asked.avoid
    choices.sort(key=lambda pair: (pair[0].node_id in avoid, pair[1].cost_s, pair[1].node.slot))
    return [
        {
            "node": node.node_id,
            "local_blocks": choice.local_blocks,
            "matched_blocks": choice.matched_blocks,
            "fetch_from": None if choice.source is None else choice.source.info.node_id,
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


def _decode_candidates(
    made: Decision, nodes: tuple[NodeSeen, ...], cost: CostModel, settings: SchedulerSettings
) -> list[dict[str, Any]]:
    """Return the nodes that could decode, the shortest predicted step first; one that lends comes last."""
    view = view_of(made, cost)
    chosen = made.result.decode_node if isinstance(made.result, Placement) else None
    needed = tokens_needed(made.asked, view)

    def beside_s(node: NodeSeen) -> float | None:
        """Return when the first token would come if the node computed the prompt too; None: it may not."""
        found = None
        if settings.roles_follow and not node.prefills:
            state = view.node(node.node_id)
            found = beside_decoding(made.asked, state, node.matched_blocks, view, cost)
        return None if found is None else found[0] + found[1]

    return [
        {
            "node": node.node_id,
            "matched_blocks": node.matched_blocks,
            "tbt_s": cost.gap_s(
                node.decode_sequences + 1,
                node.decode_context_tokens + made.asked.num_tokens,
                node.max_batch or inf,
            ),
            "beside_s": beside_s(node),
            "sequences": node.decode_sequences,
            "free_tokens": node.free_tokens,
            "fits": node.free_tokens >= needed,
            "is_avoided": node.node_id in made.asked.avoid,
        }
        for node in sorted(nodes, key=lambda node: (not node.decodes, node.step_s))
        if node.decodes or node.node_id == chosen
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
