"""Admission: take a placement only if its predictions keep the request's SLO.

Three rules for the decode side, after arXiv 2407.00079 section 7:

* LATE: admission looks at TTFT alone; the decode node is asked again when prefill is
  done (`admit_to_decode`), and what is refused then has wasted its prefill.
* EARLY: admission looks at the decode pool's load of this moment. Cheap, but what counts
  decides a prefill later, so load of both pools swings in anti-phase.
* PREDICT: admission looks at the decode pool's load projected to the moment that this
  request's prefill ends (`decode_projection.py`).

NONE admits whatever can be placed. A request without an SLO is never rejected for time.
Pure functions of the view.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from base.request import Slo
from conductor.cluster_view import ClusterView, NodeState
from conductor.cost_model import CostModel
from conductor.placement import Placement, PlacementRequest, RejectReason

# Bounds of Retry-After: sooner is no relief, later and the client has given up.
RETRY_AFTER_S = (0.5, 60.0)


class RejectPolicy(Enum):
    """When decode load is tested."""

    NONE = "none"
    LATE = "late"
    EARLY = "early"
    PREDICT = "predict"


def refusal(
    request: PlacementRequest,
    placement: Placement,
    view: ClusterView,
    cost: CostModel,
    policy: RejectPolicy,
    now_s: float,
) -> tuple[RejectReason, float] | None:
    """Return why not to carry out `placement` and the seconds to wait; None to carry it out."""
    if policy is RejectPolicy.NONE:
        return None
    slo = request.slo
    if placement.predicted_ttft_s > slo.ttft_slo_s:
        return RejectReason.TTFT, _bounded(placement.predicted_ttft_s - slo.ttft_slo_s)
    if slo.tbt_slo_s == inf or policy is RejectPolicy.LATE:
        return None
    moment_s = now_s + placement.predicted_ttft_s
    if pool_tbt_s(view, cost, policy, moment_s) > slo.tbt_slo_s:
        # one sequence leaves the pool every t_d / n seconds
        in_pool = max(1, view.running_sequences)
        return RejectReason.TBT, _bounded(view.projection.decode_s / in_pool)
    return None


def pool_tbt_s(view: ClusterView, cost: CostModel, policy: RejectPolicy, moment_s: float) -> float:
    """Return the step time of a mean decode node with one more sequence; EARLY: now, else at `moment_s`."""
    num_nodes = view.decode_mask.bit_count()
    if not num_nodes:
        return inf
    sequences: float = view.running_sequences
    tokens = view.running_context_tokens
    if policy is RejectPolicy.PREDICT:
        sequences, tokens = view.projection.at(moment_s)
    return cost.decode_step_s(sequences / num_nodes + 1, tokens / num_nodes)


def admit_to_decode(node: NodeState, cost: CostModel, context_tokens: int, slo: Slo) -> bool:
    """Return whether a prefilled sequence may join `node`: the second test of LATE."""
    step_s = cost.decode_step_s(node.running_sequences + 1, node.running_context_tokens + context_tokens)
    return step_s <= slo.tbt_slo_s


def _bounded(seconds: float) -> float:
    shortest, longest = RETRY_AFTER_S
    return min(longest, max(shortest, seconds))
