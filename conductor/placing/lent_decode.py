"""Lent decode: when a prefill node decodes, for want of room or time in the decode pool, or to spare copies.

* A sequence that joins a full decode node makes every other one there late. A prefill node takes it instead,
  if prefill nodes have time, and if a prompt of usual length still has its first token in time there: beside
  what decodes it has only a share of each step, and long prompts lose more than the sequence gains. Of those
  nodes the first that decodes already, so that few have their steps bounded; else the one that computes the
  prompt, whose KV then goes nowhere.
* Where nobody names a bound nobody is late, and still all of a decode node wait for each token as long as its
  step takes. Once that is several times as long as with one sequence, and prefill nodes have half of their
  time free, one of them takes who comes, until its own step is as long. Not whose prompt the decode node is
  to compute: that is done there sooner, mostly because the node has nearly all of it.
* Where caches are full and what they evict comes back (`copy_price.py`), a prompt that is handed over is
  stored twice and evicts as much of others. Then the node that computes it keeps it, if decoding takes less
  from the prompts of that node: so a chat stays on one node, unless bounds are tight.

Only where its step then keeps the bounds of all who decode on it. What that takes from the node's prompts is
predicted (`prompt_share.py`), and so those go to other nodes.

Pure, as `scheduler.place` is, which asks it.
"""

from __future__ import annotations

from math import inf

from base.step_budget import KEPT_MEAN, target_gap_s
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.prefill_policies import copy_s
from conductor.placing.prompt_share import LEAST_SHARE, most_tokens_s, share_beside, share_when_begun

QUEUE_S = 2.0
"""A queue of so many seconds takes all of a prefill node's time."""

SPARE_FROM = 0.7
"""Prefill nodes that have less to do than so much of their time have some for sequences."""

PRESSED_STEPS = 2.5
"""A decode node is slow whose step takes so many times as long as with one sequence."""

SPARES_FROM = 0.5
"""Prefill nodes that have less to do than so much of their time take from a slow decode node."""

IN_TIME = 0.6
"""A prompt may take this share of a bound on TTFT on a node that lends: the rest is for its queue."""

SHORT = (RejectReason.NO_FREE_BLOCKS, RejectReason.TBT)
"""Why a request is refused for which the decode pool has no room, or none in time."""

MAX_LENDERS = 8
"""Prefill nodes that are looked at."""


def lent_node(
    request: PlacementRequest,
    found: Placement | Rejection,
    computing: NodeState,
    needed: float,
    view: ClusterView,
    cost: CostModel,
    now_s: float,
) -> NodeState | None:
    """Return the prefill node that is to decode a request; None: it stays as it was found.

    Args:
        found: What the pools of both roles come to.
        computing: The prefill node that is to compute the prompt.
        needed: Tokens of KV at the sequence's end.
    """
    if isinstance(found, Rejection):
        is_short, decoding = found.reason in SHORT, computing
    else:
        decoding = view.node(found.decode_node)
        is_short = found.predicted_tbt_s > bearable_s(request, decoding, cost)
    if is_short:
        has_time = _busy(view, now_s) < SPARE_FROM
        return _lender(request, computing, needed, inf, view, cost) if has_time else None
    if isinstance(found, Rejection) or found.prefill_node == found.decode_node:
        return None
    pressed_s = _pressed_s(request, cost)
    if found.predicted_tbt_s > pressed_s and _busy(view, now_s) < SPARES_FROM:
        return _lender(request, computing, needed, pressed_s, view, cost)
    if not (view.copy_price.block_s and decoding.evict_share):
        return None
    moved = len(request.chain) - found.decode_matched_blocks
    stored_s = moved * copy_s(view) * decoding.evict_share
    if not stored_s or stored_s <= _taken_s(request, computing, pressed_s, view, cost, now_s):
        return None
    return computing if _bears(request, computing, needed, pressed_s, view, cost) else None


def _pressed_s(request: PlacementRequest, cost: CostModel) -> float:
    """Return the seconds that a step with a request should take at most; infinity: its bounds say that."""
    _, bound_s, longest_s = request.slo
    if bound_s < inf or longest_s < inf:
        return inf
    return PRESSED_STEPS * cost.decode_step_s(1, request.num_tokens)


def _taken_s(
    request: PlacementRequest,
    node: NodeState,
    within_s: float,
    view: ClusterView,
    cost: CostModel,
    now_s: float,
) -> float:
    """Return the seconds of prefill that a request takes from a prefill node's prompts while it decodes.

    As long as a node decodes, bounds limit its steps, and prompts have a share of them. A step that has some
    takes as long as bounds let it, and so the sequence decodes for longer where prompts come.
    """
    before = 1.0
    if node.decode_sequences:
        before = share_when_begun(node, cost)
    step_s, length_s = _joined_s(request, node, cost), min(within_s, bearable_s(request, node, cost))
    if step_s >= length_s:
        return inf
    after = max(0.0, _share_joined(request, node, length_s, cost))
    busy = min(1.0, view.prefill_demand.at(now_s) / view.prefill_mask.bit_count())
    # with prompts for this share of the time, `busy / length_s + (1 - busy) / step_s` steps a second
    mean_step_s = length_s * step_s / (busy * step_s + (1.0 - busy) * length_s)
    return view.expected_output_tokens(request.max_tokens) * mean_step_s * max(0.0, before - after) * busy


def bearable_s(request: PlacementRequest, node: NodeState, cost: CostModel) -> float:
    """Return how long a step without prompts may be on a node, once a request decodes there."""
    _, bound_s, longest_s = request.slo
    if longest_s < bound_s:
        bound_s = longest_s
    if node.tightest_tbt_s < bound_s:
        bound_s = node.tightest_tbt_s
    if bound_s == inf:
        return target_gap_s(cost.decode_step_s(1, request.num_tokens))
    return KEPT_MEAN * bound_s


def _busy(view: ClusterView, now_s: float) -> float:
    """Return the share of their time that prefill nodes need; infinity: there are none."""
    members = view.prefill_mask
    slot = view.prefill_order.least(members)
    if slot is None:
        return inf
    queue_s = max(0.0, view.prefill_order.values[slot] - now_s)
    return view.prefill_demand.at(now_s) / members.bit_count() + queue_s / QUEUE_S


def _lender(
    request: PlacementRequest,
    computing: NodeState,
    needed: float,
    within_s: float,
    view: ClusterView,
    cost: CostModel,
) -> NodeState | None:
    nodes = [view.members[slot] for slot in bits_of(view.lent_mask, MAX_LENDERS)]
    if computing not in nodes:
        nodes.append(computing)
    return next(
        (
            node
            for node in nodes
            if _bears(request, node, needed, within_s, view, cost)
            and _keeps_prompts(request, node, view, cost)
        ),
        None,
    )


def _keeps_prompts(request: PlacementRequest, node: NodeState, view: ClusterView, cost: CostModel) -> bool:
    """Return whether a usual prompt is computed in time on a node once a request decodes there.

    The request's own bound on TTFT stands for all: nobody knows whose prompts will come.
    """
    bound_s = request.slo.ttft_slo_s
    if bound_s == inf:
        return True
    share = _share_joined(request, node, bearable_s(request, node, cost), cost)
    return share >= LEAST_SHARE and view.mean_prefill_s / share <= IN_TIME * bound_s


def _bears(
    request: PlacementRequest,
    node: NodeState,
    needed: float,
    within_s: float,
    view: ClusterView,
    cost: CostModel,
) -> bool:
    """Return whether a prefill node has room for a request, and a step that keeps the bounds of all.

    `within_s`: what the step may take whatever they bear.
    """
    is_member = view.prefill_mask & ~view.decode_mask & 1 << node.slot
    if not is_member or node.free_tokens() < needed or node.info.node_id in request.avoid:
        return False
    if node.decode_sequences + 1 >= node.places:
        return False  # a prompt needs a place too
    return _joined_s(request, node, cost) <= min(within_s, bearable_s(request, node, cost))


def _share_joined(request: PlacementRequest, node: NodeState, length_s: float, cost: CostModel) -> float:
    """Return the share that prompts have in steps of a length, once a request decodes on a node."""
    sequences, tokens = node.decode_sequences + 1, node.decode_context_tokens + request.num_tokens
    ratio = node.learned.decode.ratio
    around_s = cost.placed_around_s(sequences, tokens, node.places) * ratio
    most_s = most_tokens_s(node, sequences, cost) * ratio
    return share_beside(_joined_s(request, node, cost), around_s, length_s, cost.chunk_part_s * ratio, most_s)


def _joined_s(request: PlacementRequest, node: NodeState, cost: CostModel) -> float:
    """Return the predicted seconds of a step without prompts, once a request decodes on a node."""
    context_tokens = node.decode_context_tokens + request.num_tokens
    step_s = cost.placed_step_s(node.decode_sequences + 1, context_tokens, node.places)
    return step_s * node.learned.decode.ratio
