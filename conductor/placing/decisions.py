"""Decisions: everything a placement was made from, so that it can be made again.

A `Decision` holds what `scheduler.place` was asked, all that it read of the cluster, and
what it answered. From it `decide_again` rebuilds a `ClusterView` and calls the same `place`:
the same answer must come out, to the bit. So an explanation (`explain.py`) shows the very
numbers that the decision was made on, and a log of a live conductor (`serving/decision_log.py`) is
a test of the scheduler on real traffic.

What was read is written down, not what happened before: a record then stands alone, and a
log may be cut anywhere. It costs some 15 numbers for each node, which is why clusters of
more than `MAX_NODES` are recorded without their nodes.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from base.request import NodeId, Role
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState, bare_node
from conductor.placing.placement import Placement, PlacementRequest, Rejection
from conductor.placing.prefill_policies import depth_at
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group, Key

# 64 nodes are some 100 us to copy; a larger cluster has more use for its requests.
MAX_NODES = 64

UNBOUNDED_TOKENS = 1 << 62


class NodeSeen(NamedTuple):
    """One node as placement saw it. Seconds, tokens."""

    node_id: NodeId
    prefills: bool
    """Whether it could be chosen to prefill; draining nodes have neither role, and may lend."""
    decodes: bool
    matched_blocks: int
    """Leading blocks of the prompt that it holds."""
    queue_ends_at_s: float
    """The moment on the conductor's clock; in the past: idle. 0 unless it prefills."""
    num_queued: int
    num_outgoing: int
    """Fetches from it under way."""
    prefill_ratio: float
    """Measured over predicted, learned so far."""
    handoff_ratio: float
    decode_ratio: float
    dispatch_s: float
    """Learned: what is in no term."""
    step_s: float
    """The predicted decode step that nodes are ordered by, longer where a prompt is computed; 0 unless it
    decodes."""
    free_tokens: float
    decode_sequences: int
    decode_context_tokens: float
    running_sequences: int
    running_context_tokens: float
    queued_s: float
    """Predicted seconds of the prefill that is placed on it."""
    tightest_tbt_s: float | None
    """The least TBT bound of what decodes on it; None: nobody has one."""
    capacity_tokens: int = UNBOUNDED_TOKENS
    """Tokens that its whole cache holds."""
    prefill_trend: float = 0.0
    """The power of the profile's seconds that the ratio grows with."""
    prefill_usual_s: float = 1.0
    """The profile's seconds of which the ratio is as it stands."""
    pace_class: int = 0
    """The node's class in `PaceClasses` with prompts of usual length."""
    evict_share: float = 0.0
    """The share of the blocks that it stored lately for which another one had to go."""
    receiving_s: float = 0.0
    """Seconds that its link takes for all that is to be handed over to it."""
    max_batch: int = 0
    """Sequences of one step, at most; 0: not said."""
    prefill_measured_ratio: float | None = None
    """The ratio of prompts that are longer than usual: of what was measured, before it was doubted."""
    longer_pace_class: int | None = None
    """The node's class with longer prompts; None: in `pace_class`."""
    chunk_tokens: int = 0
    """Tokens of prompts in one step, at most; 0: not said."""


class ViewSeen(NamedTuple):
    """The cluster as a whole, as placement saw it."""

    block_size: int
    mean_output_tokens: float
    num_in_flight: int
    running_sequences: int
    running_context_tokens: float
    decode_s: float
    """Mean seconds that a sequence decodes."""
    projected: tuple[float, float]
    """Sequences and context tokens expected to decode when this prefill ends."""
    nodes: tuple[NodeSeen, ...] | None
    """The nodes in the order of their slots, which ties go by. None: there were too many."""
    num_queued: int = 0
    """Prompts placed and not computed."""
    num_waiting: int = 0
    """Requests not placed yet."""
    block_price_s: float = 0.0
    """Seconds of recompute that a block stored in a full cache costs."""
    room_price: float = 1.0
    """How often a request's own part of a step counts, while the decode pool has no room for all."""
    prefill_demand: float = 0.0
    """Predicted seconds of prefill that are placed a second."""
    mean_prefill_s: float = 0.0
    """Predicted seconds of a prompt, over those placed lately."""
    mean_over_short: float = 1.0
    """Tokens of an answer of mean length over those of a short one."""


class Decision(NamedTuple):
    """One call of `place`."""

    asked: PlacementRequest
    arrived_at_s: float
    decided_at_s: float
    seen: ViewSeen
    result: Placement | Rejection


class Actual(NamedTuple):
    """How a placed attempt went. Seconds; None: it did not come to that."""

    ended_at_s: float
    end: str
    """finished, or the class of the error that ended the attempt, or cancelled."""
    ttft_s: float | None = None
    """Seconds from arrival; None also where an earlier attempt had sent the first token."""
    queue_s: float | None = None
    compute_s: float | None = None
    exposed_transfer_s: float | None = None
    mean_tbt_s: float | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    """Tokens that this attempt made."""
    frontend_s: float = 0.0
    """Seconds before arrival in which the request was read and tokenised."""
    reserved_s: float | None = None
    """Seconds from the placement until the decode node had set blocks aside."""
    load_s: float | None = None
    """Part of `queue_s` in which a prefix was loaded and nothing computed."""
    transfer_s: float | None = None
    """Seconds from the first write of KV to the end of the last, most of it beneath `compute_s`."""
    num_chunks: int | None = None
    """Steps that computed a part of the prompt."""
    trace_id: str = ""
    """W3C's, of the request's spans; empty: nobody traces it."""
    mean_step_s: float | None = None
    """Mean of the gaps after the first, in which a sequence that was handed over has yet to join."""


def decision(
    asked: PlacementRequest,
    view: ClusterView,
    result: Placement | Rejection,
    arrived_at_s: float,
    decided_at_s: float,
) -> Decision:
    """Write down a decision; to be called before the view counts its placement."""
    return Decision(asked, arrived_at_s, decided_at_s, _seen(asked, view, result, decided_at_s), result)


def decide_again(made: Decision, cost: CostModel, settings: SchedulerSettings) -> Placement | Rejection:
    """Return what `place` answers to the same question; ValueError if its nodes were not recorded.

    What was refused by those who waited was no question to `place`, and is returned as it is.
    """
    if isinstance(made.result, Rejection) and made.result.reason.is_of_queue:
        return made.result
    return place(made.asked, view_of(made, cost), cost, made.decided_at_s, settings)


def view_of(made: Decision, cost: CostModel) -> ClusterView:
    """Return a view that reads as the recorded one did; ValueError if its nodes were not recorded."""
    seen = made.seen
    if seen.nodes is None:
        raise ValueError(f"decision {made.asked.request_id} was recorded without its nodes")
    view = ClusterView(cost, seen.block_size)
    view.projection.restore(seen.decode_s, seen.mean_over_short)
    for node in seen.nodes:
        _restore(view, node, made, cost)
    view.mean_output_tokens = seen.mean_output_tokens
    view.num_in_flight = seen.num_in_flight
    view.running_sequences = seen.running_sequences
    view.running_context_tokens = seen.running_context_tokens
    view.num_queued = seen.num_queued
    view.num_waiting = seen.num_waiting
    view.copy_price.restore(seen.block_price_s)
    view.room_price.restore(seen.room_price, made.decided_at_s)
    view.prefill_demand.restore(seen.prefill_demand, made.decided_at_s)
    view.mean_prefill_s = seen.mean_prefill_s
    # as if all were other conductors': those are expected at any moment, whatever t_d is
    view.foreign_sequences, view.foreign_context_tokens = seen.projected
    return view


def _seen(
    asked: PlacementRequest, view: ClusterView, result: Placement | Rejection, now_s: float
) -> ViewSeen:
    nodes, groups = view.nodes(), view.index.match(asked.chain)
    return ViewSeen(
        view.block_size,
        view.mean_output_tokens,
        view.num_in_flight,
        view.running_sequences,
        view.running_context_tokens,
        view.projection.decode_s,
        view.projected(now_s + result.predicted_ttft_s, now_s),
        tuple([_node_seen(view, node, groups) for node in nodes]) if len(nodes) <= MAX_NODES else None,
        view.num_queued,
        view.num_waiting,
        view.copy_price.block_s,
        view.room_price.price,
        view.prefill_demand.at(now_s),
        view.mean_prefill_s,
        view.projection.mean_over_short,
    )


def _node_seen(view: ClusterView, node: NodeState, groups: list[Group]) -> NodeSeen:
    slot, learned = node.slot, node.learned
    usual_class, longer_class = view.paces.classes_of(slot)
    prefills, decodes = bool(view.prefill_mask >> slot & 1), bool(view.decode_mask >> slot & 1)
    return NodeSeen(
        node.info.node_id,
        prefills,
        decodes,
        depth_at(slot, groups),
        view.prefill_order.values[slot] if prefills else 0.0,
        node.num_queued,
        node.num_outgoing,
        learned.prefill.ratio,
        learned.handoff.ratio,
        learned.decode.ratio,
        learned.added_s,
        view.decode_order.values[slot] if decodes else 0.0,
        node.free_tokens(),
        node.decode_sequences,
        node.decode_context_tokens,
        node.running_sequences,
        node.running_context_tokens,
        node.queued_s,
        None if node.tightest_tbt_s == inf else node.tightest_tbt_s,
        node.capacity_tokens,
        learned.prefill.trend,
        learned.prefill.usual_s,
        usual_class,
        node.evict_share,
        node.receiving_s,
        node.info.max_batch,
        learned.prefill.measured_ratio,
        longer_class,
        node.info.chunk_tokens,
    )


def _restore(view: ClusterView, node: NodeSeen, made: Decision, cost: CostModel) -> None:
    roles = {Role.PREFILL: node.prefills, Role.DECODE: node.decodes}
    has = frozenset(role for role in roles if roles[role])
    sizes = node.max_batch, node.chunk_tokens
    info = bare_node(node.node_id, has, 0, view.block_size, 0, *sizes)
    state = view.add_node(info, 0.0)
    state.num_queued = node.num_queued
    state.queued_s = node.queued_s
    state.tightest_tbt_s = inf if node.tightest_tbt_s is None else node.tightest_tbt_s
    state.num_outgoing = node.num_outgoing
    state.capacity_tokens = node.capacity_tokens
    state.reported_free_tokens = node.free_tokens
    state.decode_sequences = node.decode_sequences
    state.decode_context_tokens = node.decode_context_tokens
    state.running_sequences = node.running_sequences
    state.running_context_tokens = node.running_context_tokens
    state.running_step_s = cost.placed_step_s(
        state.running_sequences, state.running_context_tokens, state.places
    )
    trend = node.prefill_trend, node.prefill_usual_s, node.prefill_measured_ratio
    view.corrections.restore(node.node_id, "prefill", node.prefill_ratio, *trend)
    view.corrections.restore(node.node_id, "handoff", node.handoff_ratio)
    view.corrections.restore(node.node_id, "decode", node.decode_ratio)
    view.corrections.restore_added(node.node_id, node.dispatch_s)
    blocks: tuple[Key, ...] = tuple(made.asked.chain[: node.matched_blocks])
    view.kv_events(node.node_id, 1, blocks, ())
    state.evict_share = node.evict_share
    state.receiving_s = node.receiving_s
    longer_class = node.longer_pace_class
    view.paces.move(state.slot, node.pace_class, node.pace_class if longer_class is None else longer_class)
    if node.prefills:
        view.prefill_order.set(state.slot, node.queue_ends_at_s)
    view.note_lent(state)
    if node.decodes:
        view.decode_order.set(state.slot, node.step_s)
