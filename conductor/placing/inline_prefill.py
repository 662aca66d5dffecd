"""Conditional disaggregation: when a decode node computes a prompt itself.

Its steps take as much of a prompt as those who decode there can bear (`base/step_budget.py`), so nobody's
bound is in question, and what it takes longer for that is predicted: of each step, the length of which the
tightest bound allows, the decoding takes its part, and the prompt has the rest but for what chunks cost.

    beside = prefill alone x length / (CHUNK_SHARE x (length - step without prompts))

A prompt is computed there if its first token is predicted sooner than by way of a prefill node and a
hand-off: where prefill nodes have a queue, or where the node has most of the prompt from the last turn.
Whoever is first of a line sees a short queue always, because the line is before the nodes. So a prefill
node's seconds count for those who wait behind as well, each of whom they delay by its share of the nodes.

Considered are the node that was chosen to decode and the least loaded of those that hold most of the prompt.
Pure, as `scheduler.place` is, which asks it.
"""

from __future__ import annotations

from collections.abc import Sequence

from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prefill_policies import copied_s
from conductor.placing.prompt_share import LEAST_SHARE, MOST_LOAD, decode_load, prompt_share
from kvstore.index import Group

# A second of a decode node's time, where as much of it is free as is used, in seconds of a first token. Where
# the decode pool refuses requests it counts more, by the price of room: longer steps hold room for longer.
TAKEN = 3.0

Beside = tuple[float, float, float]
"""Seconds of queue and of prefill, and the prompt's share of the node's time."""


def inline_placement(
    request: PlacementRequest,
    other: Placement,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
) -> Placement:
    """Return a placement on a decode node alone, if that is better than `other`; else `other`."""
    if other.prefill_node == other.decode_node:
        return other
    best = other
    least_s = other.predicted_ttft_s + copied_s(request, other, groups, view) + _delayed_s(other, view)
    dear = TAKEN * view.room_price.price
    for node, depth in _candidates(other, groups, view, request.avoid):
        beside = beside_decoding(request, node, depth, view, cost)
        # what it takes of others, and of caches, comes on top
        if beside is None or _ttft_s(node, beside, view) >= least_s:
            continue
        found = _inline(request, other, node, depth, beside, view, cost)
        load = min(MOST_LOAD, decode_load(node, cost, view.corrections.ratio(node.info.node_id, "decode")))
        taken_s = found.prefill_s * found.prompt_share * dear * load / (1.0 - load)
        cost_s = found.predicted_ttft_s + copied_s(request, found, groups, view) + taken_s
        if cost_s < least_s:
            best, least_s = found, cost_s
    return best


def _delayed_s(other: Placement, view: ClusterView) -> float:
    """Return the seconds by which a prompt on a prefill node delays all who wait behind it."""
    num_behind = max(0, view.num_waiting - 1)  # whoever is tried is the first of them
    return other.prefill_s * other.prompt_share * num_behind / max(1, view.prefill_mask.bit_count())


def _candidates(
    other: Placement, groups: list[Group], view: ClusterView, avoid: Sequence[NodeId]
) -> list[tuple[NodeState, int]]:
    chosen = view.node(other.decode_node)
    found = [(chosen, next((depth for depth, mask in groups if mask >> chosen.slot & 1), 0))]
    members = view.decode_mask & ~view.prefill_mask & ~view.mask_of(avoid)
    for depth, mask in groups:
        slot = view.decode_order.least(mask & members)
        if slot is not None:
            if slot != chosen.slot:
                found.append((view.node_at(slot), depth))
            break
    return found


def _inline(
    request: PlacementRequest,
    other: Placement,
    node: NodeState,
    depth: int,
    beside: Beside,
    view: ClusterView,
    cost: CostModel,
) -> Placement:
    queue_s, prefill_s, share = beside
    node_id, matched = node.info.node_id, _matched(request, depth, view)
    context_tokens = node.decode_context_tokens + request.num_tokens
    ratio = view.corrections.ratio(node_id, "decode")
    tbt_s = cost.decode_step_s(node.decode_sequences + 1, context_tokens) * ratio
    return other._replace(
        prefill_node=node_id,
        decode_node=node_id,
        matched_tokens=matched,
        local_blocks=depth,
        matched_blocks=depth,
        source_node=None,
        decode_matched_blocks=depth,
        queue_s=queue_s,
        fetch_s=0.0,
        prefill_s=prefill_s,
        handoff_s=0.0,
        predicted_ttft_s=_ttft_s(node, beside, view),
        predicted_tbt_s=tbt_s,
        dispatch_s=view.corrections.added_s(node_id),
        is_inline=True,
        prompt_share=share,
    )


def beside_decoding(
    request: PlacementRequest, node: NodeState, depth: int, view: ClusterView, cost: CostModel
) -> Beside | None:
    """Return the seconds of queue and of prefill on a node that decodes, and the prompt's share of its time.

    None: it has no room or no time.
    """
    needed = request.num_tokens + view.expected_output_tokens(request.max_tokens)
    if node.free_tokens < needed:
        return None
    node_id, matched = node.info.node_id, _matched(request, depth, view)
    prefill_s = cost.prefill_s(request.num_tokens - matched, matched)
    prefill_s = view.corrections.corrected_s(node_id, "prefill", prefill_s)
    step_s = cost.decode_step_s(node.running_sequences, node.running_context_tokens)
    step_s *= view.corrections.ratio(node_id, "decode")
    share = prompt_share(node, step_s)
    if share < LEAST_SHARE:
        return None
    return node.queued_s + (step_s if node.running_sequences else 0.0), prefill_s / share, share


def _ttft_s(node: NodeState, beside: Beside, view: ClusterView) -> float:
    queue_s, prefill_s, _ = beside
    return queue_s + prefill_s + view.corrections.added_s(node.info.node_id)


def _matched(request: PlacementRequest, depth: int, view: ClusterView) -> int:
    return min(depth * view.block_size, request.num_tokens - 1)
