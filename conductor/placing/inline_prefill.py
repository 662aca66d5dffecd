"""Conditional disaggregation: when a decode node computes a prompt itself.

A short prompt, or one whose KV the decode node mostly has from the conversation's last turn,
costs a decode node little more than a step. It is computed there if

* so little of it is new (`SchedulerSettings.inline_tokens`),
* the first token is predicted sooner than by way of a prefill node and a hand-off, and
* no step is predicted to outlast the tightest TBT bound of what decodes there; where nobody
  has a bound, to take more than twice as long as without it.

Considered are the node that was chosen to decode and the least loaded of those that hold most
of the prompt. Pure, as `scheduler.place` is, which asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group

# Of a bound: a step is predicted for contexts of mean length.
TBT_SHARE = 0.85


def inline_placement(
    request: PlacementRequest,
    other: Placement,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
) -> Placement:
    """Return a placement on a decode node alone, if that is better than `other`; else `other`."""
    best = other
    if other.prefill_node == other.decode_node:
        return other
    for node, depth in _candidates(other, groups, view, request.avoid):
        found = _inline(request, other, node, depth, view, cost, settings)
        if found is not None and found.predicted_ttft_s < best.predicted_ttft_s:
            best = found
    return best


def _candidates(
    other: Placement, groups: list[Group], view: ClusterView, avoid: Sequence[NodeId]
) -> list[tuple[NodeState, int]]:
    chosen = view.node(other.decode_node)
    found = [(chosen, next((depth for depth, mask in groups if mask >> chosen.slot & 1), 0))]
    members = view.decode_mask & ~view.prefill_mask & ~view.mask_of(avoid)
    for depth, mask in groups:
        slot = view.decode_order.least(mask & members)
        if slot is not None:
            found.append((view.node_at(slot), depth))
            break
    return found


def _inline(
    request: PlacementRequest,
    other: Placement,
    node: NodeState,
    depth: int,
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
) -> Placement | None:
    matched = min(depth * view.block_size, request.num_tokens - 1)
    new_tokens = request.num_tokens - matched
    needed = request.num_tokens + view.expected_output_tokens(request.max_tokens)
    if new_tokens > settings.inline_tokens or node.free_tokens < needed:
        return None
    ratio = view.corrections.ratio
    node_id = node.info.node_id
    prefill_s = view.corrections.corrected_s(node_id, "prefill", cost.prefill_s(new_tokens, matched))
    step_s = cost.decode_step_s(node.decode_sequences, node.decode_context_tokens) * ratio(node_id, "decode")
    bound_s = 2 * step_s if node.tightest_tbt_s == inf else node.tightest_tbt_s * TBT_SHARE
    if node.decode_sequences and step_s + node.queued_s + prefill_s > bound_s:
        return None
    queue_s = node.queued_s + (step_s if node.running_sequences else 0.0)
    dispatch_s = view.corrections.added_s(node_id)
    context_tokens = node.decode_context_tokens + request.num_tokens
    tbt_s = cost.decode_step_s(node.decode_sequences + 1, context_tokens) * ratio(node_id, "decode")
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
        predicted_ttft_s=queue_s + prefill_s + dispatch_s,
        predicted_tbt_s=tbt_s,
        dispatch_s=dispatch_s,
        is_inline=True,
    )
