"""Placement: which nodes serve a request. Algorithm 1 of arXiv 2407.00079, and past it.

    for each group of prefill nodes with the same matched depth, deepest first:
        take the node of the group whose queue ends first
        TTFT = queue + prefill(prompt, own prefix)                  or, where it pays,
               max(queue, fetch of the missing blocks) + prefill(prompt, best prefix)
    keep the smallest; choose the decode node; test admission

Nodes of one group differ in nothing but their queue, so one stands for all: the work is
O(depth + groups), not O(nodes). A group whose prefill alone is no better than the best
candidate so far is passed over, and so are all shallower ones.

What the paper leaves open, and what is chosen here:

* whether to fetch: `kvcache_balancing_threshold` is "adjusted manually" there. Here the
  cost model decides, candidate by candidate, whether fetching or computing is sooner. A
  threshold in `SchedulerSettings` brings the paper's rule back.
* fetch and queue overlap, because a node fetches what its queue will need;
* the source is the holder with the fewest fetches from it, and a busy link is shared;
* the decode node is the one with the shortest predicted step, unless one that holds a
  part of the prompt has a step that is hardly longer: then fewer bytes travel;
* a prompt of which a vector is wanted has no decode node: it ends where it is computed;
* where one node does both, the sequence stays there, and its KV goes nowhere: so the node that is to
  compute decodes too, if it may and another's step is hardly shorter;
* a node that failed an attempt of the request is chosen, or fetched from, where no other will
  do: it may be dead, which shows when its lease ends, some seconds later;
* ties go to the smaller slot.

`place` is pure: no I/O, no clock, no randomness; it changes nothing. The live conductor
and replay call this very function.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from base.request import Slo
from conductor.placing.admission import RETRY_AFTER_S, refusal
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.inline_prefill import inline_placement
from conductor.placing.lent_decode import lent_node
from conductor.placing.node_state import NodeState
from conductor.placing.placement import UNBOUNDED, Placement, PlacementRequest, Rejection, RejectReason
from conductor.placing.prefill_policies import (
    POLICIES,
    PrefillChoice,
    PrefillPolicy,
    depth_at,
    preferred,
)
from conductor.placing.scheduler_settings import DEFAULT_SETTINGS, SchedulerSettings
from kvstore.index import Group

# A decode node that saves bytes may cost this much of TBT against the least loaded one.
DECODE_AFFINITY = 1.05

# Decode nodes that are looked at where a hand-off would wait for others on the link of the least loaded one.
LINK_TRIES = 8

# Seconds between two tries of those who wait, at least, where nothing happens but that time passes.
SHORTEST_TRY_S = 0.01

# If the least loaded decode nodes cannot hold a prompt, others can only where nodes differ.
DECODE_TRIES = 4


def place(
    request: PlacementRequest,
    view: ClusterView,
    cost: CostModel,
    now_s: float,
    settings: SchedulerSettings | None = None,
    choose_prefill: PrefillPolicy | None = None,
) -> Placement | Rejection:
    """Choose the nodes that serve `request`, or refuse it.

    Args:
        request: What is asked.
        view: The cluster as it is believed to be; not changed. The caller counts a
            placement that it carries out with `view.placed`.
        cost: Predicts seconds.
        now_s: On the clock of the view's events.
        settings: An operator's; by default the cost model decides and PREDICT rejects.
        choose_prefill: Another rule for the prefill node, for comparison.
    """
    settings = settings or DEFAULT_SETTINGS
    if not view.prefill_mask:
        return Rejection(request.request_id, RejectReason.NO_PREFILL_NODE, RETRY_AFTER_S[0])
    view.settle(now_s)
    groups = view.index.match(request.chain)
    choose = choose_prefill or POLICIES[settings.policy]
    prefill = choose(request, groups, view, cost, settings, now_s)
    needed = tokens_needed(request, view)
    decode = choose_decode(request, groups, view, prefill, needed)
    found = _judged(request, prefill, decode, groups, view, cost, settings, now_s)
    if not (settings.roles_follow and request.max_tokens):
        return found
    node = lent_node(request, found, prefill.node, needed, view, cost, now_s)
    if node is None:
        return found
    lent = node, depth_at(node.slot, groups)
    other = _judged(request, prefill, lent, groups, view, cost, settings, now_s)
    return other if isinstance(other, Placement) else found


def _judged(
    request: PlacementRequest,
    prefill: PrefillChoice,
    decode: tuple[NodeState, int] | RejectReason,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> Placement | Rejection:
    """Return the placement on these nodes, or a better one where the prompt decodes; or why it is refused."""
    if not isinstance(decode, tuple):
        return Rejection(request.request_id, decode, until_a_finish_s(view))
    decoding, decode_blocks = decode
    placement = _combine(request, prefill, decoding, decode_blocks, view, cost)
    if settings.roles_follow:
        placement = inline_placement(request, placement, prefill.node, decoding, groups, view, cost, now_s)
    refused = refusal(request, placement, view, cost, settings, now_s)
    if refused is None:
        return placement
    reason, retry_after_s, has_room = refused
    return Rejection(
        request.request_id,
        reason,
        retry_after_s,
        placement.predicted_ttft_s,
        placement.predicted_tbt_s,
        has_room,
    )


def must_wait(view: ClusterView, settings: SchedulerSettings, now_s: float) -> bool:
    """Return whether every prefill node has enough ahead of it; also where there is none."""
    view.settle(now_s)
    slot = view.prefill_order.least(view.prefill_mask)
    if slot is None:
        return True
    node = view.members[slot]
    has_prompts = node.num_queued > 0 or node.foreign_queue_s > 0.0
    return has_prompts and view.prefill_order.values[slot] - now_s > settings.ahead_s


def try_again_at_s(
    view: ClusterView, settings: SchedulerSettings, now_s: float, decodes: bool = True
) -> float:
    """Return when a queue will have become short enough, so that those who wait are tried again.

    Infinity: a role has no node that a request needs, which `decodes` or does not, and no time brings one.
    """
    slot = view.prefill_order.least(view.prefill_mask)
    if slot is None or view.missing_role(decodes) is not None:
        return inf
    return max(view.prefill_order.values[slot] - settings.ahead_s, now_s + SHORTEST_TRY_S)


class Turn(Enum):
    """Whether a request may be placed now."""

    NOW = "now"
    LATER = "later"
    """Not now: it waits, whatever placement says."""
    LATER_IF_PROMISING = "later if promising"
    """Not now, unless it has to be refused or a decode node computes it."""
    LATER_UNLESS_INLINE = "later unless inline"
    """Not now, unless a decode node computes it: who names no bound is not refused for want of room."""


def turn_of(
    slo: Slo,
    ahead_s: float,
    view: ClusterView,
    settings: SchedulerSettings,
    now_s: float,
    decodes: bool = True,
) -> Turn:
    """Return whether it is the turn of a request with these bounds; others before it take `ahead_s`.

    `decodes`: whether it needs a decode node.
    """
    if view.missing_role(decodes) is not None:
        return Turn.LATER
    if not ahead_s and (settings.ahead_s == inf or not must_wait(view, settings, now_s)):
        return Turn.NOW
    if slo != UNBOUNDED:
        return Turn.LATER_IF_PROMISING
    return Turn.LATER_UNLESS_INLINE if settings.roles_follow else Turn.LATER


def is_final(
    result: Placement | Rejection,
    turn: Turn,
    asked: PlacementRequest,
    ahead_s: float,
    view: ClusterView,
    patience_s: float,
    has_begun: bool,
) -> bool:
    """Return whether what `place` says is done; else the request waits on.

    A request that has begun is not rejected: it waits, before all others, for what may come.

    Args:
        result: Of `place`.
        turn: Of `turn_of`.
        asked: What `place` was asked.
        ahead_s: What others before it take; 0: it is the next.
        view: What `place` was shown, with `num_waiting` as it is.
        patience_s: The longest that a request without a bound on TTFT waits.
        has_begun: Whether it has a token.
    """
    if isinstance(result, Rejection):
        if has_begun or turn is Turn.LATER_UNLESS_INLINE:
            return False
        if result.reason is not RejectReason.NO_FREE_BLOCKS:
            return True
        return not _gets_blocks(asked, view.num_waiting if ahead_s else 0, view, patience_s)
    return turn is Turn.NOW or result.is_inline


def _gets_blocks(asked: PlacementRequest, num_before: int, view: ClusterView, patience_s: float) -> bool:
    """Return whether a request without a bound on TTFT waits for blocks: one who decodes ends for each.

    For it and for those before it: however many wait behind are no reason to refuse who is next.
    Who names one is rejected: whoever waits for blocks has all others wait behind it, past their bounds.
    """
    if asked.slo[0] < inf or not view.can_hold(asked.num_tokens):
        return False
    return asked.waited_s + (num_before + 1) * a_finish_s(view) <= patience_s


def tokens_needed(request: PlacementRequest, view: ClusterView) -> float:
    """Return the tokens of KV that `request` is expected to hold at its end."""
    return request.num_tokens + view.expected_output_tokens(request.max_tokens)


def choose_decode(
    request: PlacementRequest,
    groups: list[Group],
    view: ClusterView,
    prefill: PrefillChoice,
    peak_tokens: float,
) -> tuple[NodeState, int] | RejectReason:
    """Return the decode node and how many leading blocks it holds already."""
    if not request.max_tokens:
        return prefill.node, prefill.local_blocks
    if not view.decode_mask:
        return RejectReason.NO_DECODE_NODE
    members = preferred(view.decode_mask, request, view) if request.avoid else view.decode_mask
    least = _least_with_room(members, view, peak_tokens, request.num_tokens)
    if least is None and members != view.decode_mask:
        members = view.decode_mask
        least = _least_with_room(members, view, peak_tokens, request.num_tokens)
    if least is None:
        return RejectReason.NO_FREE_BLOCKS
    if least.receiving_s > prefill.ready_s:
        least = _least_receiving(least, members, view, peak_tokens)
    return _nearer_decode(least, members, groups, view, peak_tokens, prefill)


def _least_receiving(least: NodeState, members: int, view: ClusterView, peak_tokens: float) -> NodeState:
    """Return the node whose link is free first, of the few with the shortest steps, `least` first."""
    best = node = least
    for _ in range(LINK_TRIES):
        members &= ~(1 << node.slot)
        slot = view.decode_order.least(members)
        if slot is None:
            break
        node = view.members[slot]
        if node.receiving_s < best.receiving_s and node.free_tokens() >= peak_tokens:
            best = node
    return best


def _least_with_room(
    members: int, view: ClusterView, peak_tokens: float, num_tokens: int
) -> NodeState | None:
    for _ in range(DECODE_TRIES):
        slot = view.decode_order.least(members)
        if slot is None:
            return None
        node = view.members[slot]
        # an empty node takes what is expected to outgrow it: it ends a sequence where its cache ends
        free_tokens = node.free_tokens()
        if free_tokens >= peak_tokens or free_tokens >= node.capacity_tokens > num_tokens:
            return node
        members ^= 1 << slot
    return None


def _nearer_decode(
    least: NodeState,
    members: int,
    groups: list[Group],
    view: ClusterView,
    peak_tokens: float,
    prefill: PrefillChoice,
) -> tuple[NodeState, int]:
    """Return the least loaded node, or one hardly more loaded that computes or holds more of the prompt."""
    values, node = view.decode_order.values, prefill.node
    limit_s = values[least.slot] * DECODE_AFFINITY
    if members >> node.slot & 1 and values[node.slot] <= limit_s and node.free_tokens() >= peak_tokens:
        return node, prefill.local_blocks
    for depth, mask in groups:
        slot = view.decode_order.least(holders) if (holders := mask & members) else None
        if slot is not None and values[slot] <= limit_s:
            node = view.members[slot]
            if node.free_tokens() >= peak_tokens:
                return node, depth
    return least, 0


def _combine(
    request: PlacementRequest,
    prefill: PrefillChoice,
    decode_node: NodeState,
    decode_blocks: int,
    view: ClusterView,
    cost: CostModel,
) -> Placement:
    prefill_node, source, queue_s = prefill.node, prefill.source, prefill.queue_s
    num_tokens, learned = request.num_tokens, prefill_node.learned
    handoff_s = step_s = 0.0
    moved_tokens = num_tokens - decode_blocks * view.block_size
    if moved_tokens > 0 and decode_node is not prefill_node:
        whole_s, receiving_s = cost.transfer_s(moved_tokens), decode_node.receiving_s
        handoff_s = cost.shown_s(whole_s, prefill.prefill_s) * learned.handoff.ratio
        # after what the links have to move before it
        late_s = (receiving_s if receiving_s > queue_s else queue_s) + whole_s - prefill.ready_s
        if late_s > handoff_s:
            handoff_s = late_s
    if request.max_tokens:
        context_tokens = decode_node.decode_context_tokens + num_tokens
        step_s = cost.gap_s(decode_node.decode_sequences + 1, context_tokens, decode_node.places)
        step_s *= decode_node.learned.decode.ratio
    dispatch_s = learned.added_s
    # by position: a call with fourteen keywords takes half as long again
    return Placement(
        request.request_id,
        prefill_node.info.node_id,
        decode_node.info.node_id,
        prefill.matched_tokens,
        prefill.local_blocks,
        prefill.matched_blocks,
        None if source is None else source.info.node_id,
        decode_blocks,
        queue_s,
        prefill.fetch_s,
        prefill.prefill_s,
        handoff_s,
        prefill.ready_s + handoff_s + dispatch_s,
        step_s,
        dispatch_s,
        False,
        prefill.prompt_share,
    )


def until_a_finish_s(view: ClusterView) -> float:
    """Return when to ask again: the seconds until one of the placed requests is over, within reason."""
    shortest, longest = RETRY_AFTER_S
    return min(longest, max(shortest, a_finish_s(view)))


def a_finish_s(view: ClusterView) -> float:
    """Return the seconds after which one of the placed requests is expected to be over."""
    return view.projection.decode_s / max(1, view.num_in_flight)
