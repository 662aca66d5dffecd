"""Admission: take a placement only if its predictions keep the request's SLO.

Three rules for the decode side, after arXiv 2407.00079 section 7:

* LATE: admission looks at TTFT alone; the decode node is asked again when prefill is
  done (`admit_to_decode`), and what is refused then has wasted its prefill.
* EARLY: admission looks at the decode pool's load of this moment. Cheap, but what counts
  decides a prefill later, so load of both pools swings in anti-phase. The pool's, as in the
  paper, and not that of the node that was chosen: it is chosen by what is placed on it, so
  what runs on it now is often more than elsewhere (tested by the node, EARLY rejected up to
  23 % more than LATE; bench/results/replay.md).
* PREDICT: admission looks at the decode pool's load projected to the moment that this
  request's prefill ends (`decode_projection.py`), and charges what it takes of it by the
  price of room (`room_price.py`). EARLY prefers short contexts without meaning to: who is
  tested twice has to fit twice, and a long one fits less often.

EARLY and PREDICT are tested again at the decode node, as in the paper.

NONE admits whatever can be placed. A request without an SLO is never rejected for time.
Pure functions of the view.
"""

from __future__ import annotations

from math import inf

from base.request import Slo
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest, RejectReason
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings

# Bounds of Retry-After: sooner is no relief, later and the client has given up.
RETRY_AFTER_S = (0.5, 60.0)

# Looked up once: a member of an enum takes longer than a call.
NONE, LATE, PREDICT = RejectPolicy.NONE, RejectPolicy.LATE, RejectPolicy.PREDICT

# Share that predicted sequences may take of what a bound leaves above a step without any. They are
# predicted with contexts as long as on average over their lives, and others may come. Aiming at the
# bound itself, 20 % of requests met it; at 0.85 of all of it, 81 % did (replay of the conversation trace at
# 2x, 10P2D, TBT 60 to 70 ms, all three rules alike). The step that is always there is known: of a bound
# of 8 ms near its 4.4, the same share of the whole left half of the room unused.
TBT_HEADROOM = 0.85


def refusal(
    request: PlacementRequest,
    placement: Placement,
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> tuple[RejectReason, float, bool] | None:
    """Return why not to carry out `placement`, the seconds to wait, and whether decode has room; None: do.

    Who is refused though there is room takes that of several others.
    """
    policy = settings.reject
    if policy is NONE:
        return None
    bound_s, tbt_slo_s, _ = request.slo
    ttft_s = request.waited_s + placement.predicted_ttft_s
    # who was let wait with some room is not sent away for having lost a part of it
    if not request.is_promised:
        bound_s *= settings.ttft_headroom
    if ttft_s > bound_s:
        return RejectReason.TTFT, _bounded(ttft_s - bound_s), False
    if tbt_slo_s == inf or policy is LATE or not request.max_tokens:
        return None
    node = view.node(placement.decode_node)
    bound_s, others_s = step_limit_s(tbt_slo_s, cost, node.learned.decode.ratio), 0.0
    if policy is PREDICT:
        if view.room_price.price > 1.0:
            others_s = displaced_s(request, placement, view, cost, now_s)
        # in time beside all who were placed and have not ended: it does not matter who has by then
        sequences = view.projection.num_sequences + view.foreign_sequences
        tokens = view.projection.num_tokens + view.foreign_context_tokens
        if _pool_tbt_s(request, node, view, cost, sequences, tokens) + others_s <= bound_s:
            return None
    tbt_s = decode_tbt_s(request, placement, view, cost, policy, now_s)
    if tbt_s + others_s <= bound_s:
        return None
    # one sequence leaves the pool every t_d / n seconds
    in_pool = max(1, view.running_sequences)
    return RejectReason.TBT, _bounded(view.projection.decode_s / in_pool), tbt_s <= bound_s


def step_limit_s(tbt_slo_s: float, cost: CostModel, ratio: float = 1.0) -> float:
    """Return the seconds that a step may be predicted to take under a bound on TBT.

    `ratio` is what was learned of the node's steps.
    """
    empty_s = cost.empty_step_s * ratio
    return tbt_slo_s if empty_s > tbt_slo_s else empty_s + TBT_HEADROOM * (tbt_slo_s - empty_s)


def decode_tbt_s(
    request: PlacementRequest,
    placement: Placement,
    view: ClusterView,
    cost: CostModel,
    policy: RejectPolicy,
    now_s: float,
) -> float:
    """Return the step time that this request would meet in the mean node: now, or when it is prefilled.

    Where prefill nodes decode too, it is at least that of the chosen node as it is.
    """
    sequences, tokens = float(view.running_sequences), view.running_context_tokens
    if policy is PREDICT:
        sequences, tokens = view.projected(now_s + placement.predicted_ttft_s, now_s)
    return _pool_tbt_s(request, view.node(placement.decode_node), view, cost, sequences, tokens)


def _pool_tbt_s(
    request: PlacementRequest,
    node: NodeState,
    view: ClusterView,
    cost: CostModel,
    sequences: float,
    tokens: float,
) -> float:
    """Return the step time of the mean node where so many decode in all, and this request with them."""
    ratio = node.learned.decode.ratio
    if not view.decode_mask >> node.slot & 1:
        # lent: it is no part of the pool
        context_tokens = node.decode_context_tokens + request.num_tokens
        return cost.gap_s(node.decode_sequences + 1, context_tokens, node.places) * ratio
    num_nodes = (view.decode_mask | view.lent_mask).bit_count()
    context_tokens = tokens / num_nodes + request.num_tokens
    gap_s = _short_answer_gap_s(sequences / num_nodes + 1, context_tokens, view.decode_places, view, cost)
    if view.lent_mask:
        # of the mean those have little who lend: it would promise room that this node refuses in the end
        running, tokens = node.running_sequences + 1, node.running_context_tokens + request.num_tokens
        gap_s = max(gap_s, _short_answer_gap_s(running, tokens, node.places, view, cost))
    return gap_s * ratio


def _short_answer_gap_s(
    sequences: float, context_tokens: float, places: float, view: ClusterView, cost: CostModel
) -> float:
    """Return the mean seconds of a token of a short answer where so many are to decode on so many places.

    Whoever waits for a place does so once. A short answer has few tokens to spread that over: judged by one
    of mean length, most of those with shorter ones were late.
    """
    gap_s = cost.gap_s(sequences, context_tokens, places)
    if sequences <= places:
        return gap_s
    step_s = gap_s * places / sequences
    return step_s + (gap_s - step_s) * view.projection.mean_over_short


def displaced_s(
    request: PlacementRequest, placement: Placement, view: ClusterView, cost: CostModel, now_s: float
) -> float:
    """Return the seconds of a step that this request takes from others that could be served instead of it.

    What it takes of a step beyond the mean of those who will decode then, by the price of room in the pool:
    nothing while that takes all that come, and nothing where it takes as much as they do.
    """
    sequences, tokens = view.projected(now_s + placement.predicted_ttft_s, now_s)
    if not sequences:
        return 0.0
    ratio = view.node(placement.decode_node).learned.decode.ratio
    more_s = cost.decode_step_s(1, request.num_tokens) - cost.decode_step_s(1, tokens / sequences)
    return max(0.0, (view.room_price.price - 1.0) * more_s * ratio)


def admit_to_decode(
    node: NodeState, cost: CostModel, context_tokens: int, slo: Slo, policy: RejectPolicy
) -> bool:
    """Return whether a prefilled sequence may join `node`: the second test."""
    if policy is NONE:
        return True
    limit_s = step_limit_s(slo.tbt_slo_s, cost, node.learned.decode.ratio)
    return joined_tbt_s(node, cost, context_tokens) <= limit_s


def joined_tbt_s(node: NodeState, cost: CostModel, context_tokens: int) -> float:
    """Return the step time on `node` once a prefilled sequence has joined it."""
    tokens = node.running_context_tokens + context_tokens
    return cost.gap_s(node.running_sequences + 1, tokens, node.places) * node.learned.decode.ratio


def _bounded(seconds: float) -> float:
    shortest, longest = RETRY_AFTER_S
    return min(longest, max(shortest, seconds))
