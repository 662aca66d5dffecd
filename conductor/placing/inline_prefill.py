"""Conditional disaggregation: when a decode node computes a prompt itself.

Its steps take as much of a prompt as those who decode there can bear (`base/step_budget.py`), so nobody's
bound is in question, and what it takes longer for that is predicted: prefill alone / the prompt's share of
the node's time (`prompt_share.py`).

A prompt is computed there if its first token is predicted sooner than by way of a prefill node and a
hand-off: where prefill nodes have a queue, or where the node has most of the prompt from the last turn.
Whoever is first of a line sees a short queue always, because the line is before the nodes. So a prefill
node's seconds count for those who wait behind as well, each of whom they delay by its share of the nodes, and
for those who come until the line is gone: of nodes that are busy for a share u of their time these are
u / (1 - u) for each that waits now. And where nobody names a bound, each who decodes there waits for its next
token while the prompt is computed: two such seconds count as one of a first token.

Considered are the node that was chosen to decode and the least loaded of those that hold most of the prompt.
Pure, as `scheduler.place` is, which asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from base.request import NodeId
from base.step_budget import KEPT_MEAN
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prefill_policies import copied_s, depth_at, matched_tokens
from conductor.placing.prompt_share import LEAST_SHARE, MOST_LOAD, decode_load, share_beside_running
from kvstore.index import Group

# A second of a decode node's time, where as much of it is free as is used, in seconds of a first token. Where
# the decode pool refuses requests it counts more, by the price of room: longer steps hold room for longer.
TAKEN = 3.0

# Prefill nodes count as busy for so much of their time at most: at 1 a queue would never end.
MOST_BUSY = 0.62

# A second in which a sequence waits for its next token, in seconds of a first token. It counts where nobody
# names a bound: bounds that are kept say themselves what a gap may be.
GAP_SECOND = 0.5

Beside = tuple[float, float, float]
"""Seconds of queue and of prefill, and the prompt's share of the node's time."""


def inline_placement(
    request: PlacementRequest,
    other: Placement,
    computing: NodeState,
    decoding: NodeState,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    now_s: float,
) -> Placement:
    """Return a placement on a decode node alone, if that is better than `other`; else `other`.

    `computing`, `decoding`: the nodes of `other`.
    """
    if computing is decoding:
        return other
    best, copied = other, copied_s(request, other, computing, decoding, groups, view)
    least_s = other.predicted_ttft_s + copied
    if view.num_waiting > 1:
        least_s += _delayed_s(other, view, now_s)
    for node, depth in _candidates(decoding, groups, view, request.avoid):
        beside = beside_decoding(request, node, depth, view, cost, least_s)
        # what it takes of others, and of caches, comes on top
        if beside is None or beside[0] + beside[1] + node.learned.added_s >= least_s:
            continue
        found = _inline(request, node, depth, beside, view, cost)
        load = min(MOST_LOAD, decode_load(node, cost))
        dear = TAKEN * view.room_price.price
        taken_s = found.prefill_s * found.prompt_share * dear * load / (1.0 - load)
        if node.tightest_tbt_s == inf:
            taken_s += GAP_SECOND * found.prefill_s * found.prompt_share * node.running_sequences
        cost_s = found.predicted_ttft_s + copied_s(request, found, node, node, groups, view) + taken_s
        if cost_s < least_s:
            best, least_s = found, cost_s
    return best


def _delayed_s(other: Placement, view: ClusterView, now_s: float) -> float:
    """Return the seconds by which a prompt on a prefill node delays all who wait behind it, or will."""
    num_behind = view.num_waiting - 1  # whoever is tried is the first of them
    busy = min(MOST_BUSY, view.prefill_demand.at(now_s) / view.num_prefill)
    return other.prefill_s * other.prompt_share * num_behind / view.num_prefill / (1 - busy)


def _candidates(
    chosen: NodeState, groups: list[Group], view: ClusterView, avoid: Sequence[NodeId]
) -> list[tuple[NodeState, int]]:
    found = [(chosen, depth_at(chosen.slot, groups))]
    members = view.decode_mask & ~view.prefill_mask
    if avoid:
        members &= ~view.mask_of(avoid)
    for depth, mask in groups:
        if not (holders := mask & members):
            continue
        slot = view.decode_order.least(holders)
        if slot is not None:
            if slot != chosen.slot:
                found.append((view.members[slot], depth))
            break
    return found


def _inline(
    request: PlacementRequest,
    node: NodeState,
    depth: int,
    beside: Beside,
    view: ClusterView,
    cost: CostModel,
) -> Placement:
    queue_s, prefill_s, share = beside
    node_id, matched = node.info.node_id, matched_tokens(request, depth, view)
    context_tokens = node.decode_context_tokens + request.num_tokens
    tbt_s = cost.gap_s(node.decode_sequences + 1, context_tokens, node.places) * node.learned.decode.ratio
    return Placement(
        request.request_id,
        node_id,
        node_id,
        matched,
        depth,
        depth,
        None,
        depth,
        queue_s,
        0.0,
        prefill_s,
        0.0,
        queue_s + prefill_s + node.learned.added_s,
        tbt_s,
        node.learned.added_s,
        True,
        share,
    )


def beside_decoding(
    request: PlacementRequest,
    node: NodeState,
    depth: int,
    view: ClusterView,
    cost: CostModel,
    within_s: float = inf,
) -> Beside | None:
    """Return the seconds of queue and of prefill on a node that decodes, and the prompt's share of its time.

    None: it has no room, or no time, or would take `within_s` even if it did nothing else.
    """
    matched = matched_tokens(request, depth, view)
    prefill_s = node.learned.prefill.corrected_s(cost.prefill_s(request.num_tokens - matched, matched))
    sequences, queue_s, step_s = node.running_sequences, node.queued_s, 0.0
    if sequences:
        step_s = node.running_step_s * node.learned.decode.ratio
        queue_s += step_s
        if (behind := sequences + 1 - node.places) > 0:
            # a prompt needs a place in the step too, after those who wait for one
            queue_s += behind * view.mean_output_tokens * step_s / node.places
    if queue_s + prefill_s + node.learned.added_s >= within_s:
        return None
    if node.free_tokens() < request.num_tokens + view.expected_output_tokens(request.max_tokens):
        return None
    if not sequences:
        return queue_s, prefill_s, 1.0
    share = share_beside_running(node, node.tightest_tbt_s, cost)
    if share <= LEAST_SHARE or step_s >= KEPT_MEAN * node.tightest_tbt_s:
        return None
    return queue_s, prefill_s / share, share
