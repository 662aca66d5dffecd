"""A node and a placed request, as one conductor counts them. `cluster_view.py` keeps the account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from base.errors import StaleError
from base.grants import PeerDescriptor
from base.kv_layout import layout_difference
from base.messages import NodeInfo
from base.request import NodeId, Role
from conductor.placing.cost_model import NodeCorrections
from conductor.placing.passed_time import PassedTime
from kvstore.index import NodeEvents

# What a prompt that was to be done is expected to take yet, in prompts of the queue's mean length.
OVERDUE = 0.25
# Less than this is the time that a message takes, and the last part of a hand-off.
OVERDUE_S = 0.1


@dataclass(slots=True, eq=False)
class NodeState:
    """One node: what it reports, and what this conductor has placed on it."""

    info: NodeInfo
    slot: int
    events: NodeEvents
    learned: NodeCorrections
    passed: PassedTime
    capacity_tokens: int
    reported_free_tokens: float
    # sequences of one step, at most
    places: float
    is_member: bool = True
    # by its own word: nothing new is placed on it
    is_draining: bool = False
    num_queued: int = 0
    # of all time: whose gaps held a prompt's steps is known by it
    num_prompts: int = 0
    queued_s: float = 0.0
    # of whole prompts, as nodes report those that wait: what is matched of one shows when it begins
    queued_tokens: int = 0
    foreign_queue_s: float = 0.0
    # to decode here, in prefill ones included; with what other conductors have running here
    decode_sequences: int = 0
    decode_context_tokens: float = 0.0
    peak_tokens: float = 0.0
    # of their KV, which lies in blocks of one another
    shared_tokens: float = 0.0
    # of those, decoding already
    running_sequences: int = 0
    running_context_tokens: float = 0.0
    # of their step, by the profile
    running_step_s: float = 0.0
    # another conductor's, of those that run
    foreign_context_tokens: int = 0
    foreign_sequences: int = 0
    full_until_s: float = 0.0
    num_outgoing: int = 0
    # of prompts that are placed and not handed over, at the whole rate of its link
    sending_s: float = 0.0
    receiving_s: float = 0.0
    # when its link has sent all of that
    sends_until_s: float = 0.0
    # of the blocks stored lately, how many another one had to go for
    evict_share: float = 0.0
    # of what was placed here to decode: how many have each bound, and the least
    tbt_bounds: dict[float, int] = field(default_factory=dict)
    tightest_tbt_s: float = inf
    # of those that decode already
    running_bounds: dict[float, int] = field(default_factory=dict)
    tightest_running_s: float = inf

    def bind_tbt(self, bound_s: float, count: int) -> None:
        """Count `count` more sequences with a TBT bound; -1: one less."""
        self.tightest_tbt_s = _least_of(self.tbt_bounds, bound_s, count)

    def count_running(self, count: int, tokens: float, bound_s: float) -> None:
        """Count `count` more sequences that decode, with so many tokens in all; -1: one less."""
        self.running_sequences += count
        self.running_context_tokens += tokens
        if bound_s != inf:
            self.tightest_running_s = _least_of(self.running_bounds, bound_s, count)

    @property
    def behind_s(self) -> float:
        """Predicted seconds of this conductor's prompts that wait for the first of them."""
        return self.queued_s * (self.num_queued - 1) / self.num_queued if self.num_queued else 0.0

    @property
    def overdue_s(self) -> float:
        """Seconds that prompts will take yet which were predicted to be done: of the first, nobody knows."""
        seconds = self.behind_s + OVERDUE * self.queued_s / max(1, self.num_queued)
        return seconds if seconds > OVERDUE_S else 0.0

    @property
    def heard(self) -> tuple[object, ...]:
        """Return what only the node's reports change, and by which somebody who waits may be placed.

        Free blocks are not in it: who waits for those is tried as time passes (`try_again_at_s`).
        """
        foreign = self.foreign_queue_s, self.foreign_sequences, self.foreign_context_tokens
        return self.info.roles, self.is_draining, *foreign

    def give_back(self, peak_tokens: float) -> None:
        """Count the KV of a sequence as free that is over; what it shared is not, until the node says so."""
        # with none of ours left it is exactly nothing: sums of floats drift
        is_last = self.decode_sequences == self.foreign_sequences
        self.peak_tokens = 0.0 if is_last else self.peak_tokens - peak_tokens
        self.shared_tokens = max(0.0, self.shared_tokens - peak_tokens)
        self.reported_free_tokens += peak_tokens

    def free_tokens(self) -> float:
        """Return the tokens of KV that are free or evictable, as far as we know."""
        left = self.capacity_tokens - self.peak_tokens + self.shared_tokens
        return left if left < self.reported_free_tokens else self.reported_free_tokens


@dataclass(slots=True, eq=False)
class InFlight:
    """One placed request, as the conductor counts it."""

    prefill: NodeState
    decode: NodeState
    source: NodeState | None
    prefill_s: float
    prompt_tokens: int
    context_tokens: int
    peak_tokens: float
    handoff_s: float
    decode_from_s: float
    tbt_slo_s: float
    decodes: bool
    """Whether anything decodes of it; else `decode` is `prefill`, and counts nothing."""
    is_prefilled: bool = False


def _least_of(bounds: dict[float, int], bound_s: float, count: int) -> float:
    """Count so many more of a bound, and return the least of all."""
    bounds[bound_s] = bounds.get(bound_s, 0) + count
    if not bounds[bound_s]:
        del bounds[bound_s]
    return min(bounds, default=inf)


def bare_node(
    node_id: NodeId,
    roles: frozenset[Role],
    num_blocks: int,
    block_size: int,
    epoch: int = 0,
    max_batch: int = 0,
    chunk_tokens: int = 0,
) -> NodeInfo:
    """Return a node that nobody can connect to: what placement reads of one, and no more."""
    peer = PeerDescriptor(node_id, epoch, ())
    info = NodeInfo(node_id, epoch, roles, "", "", 0, num_blocks, block_size, peer, "")
    return replace(info, max_batch=max_batch, chunk_tokens=chunk_tokens)


def require_same_kv(info: NodeInfo, others: Iterable[NodeInfo], block_size: int) -> None:
    """Raise StaleError if a node's KV cannot be exchanged with that of others.

    A node without roles has blocks of any model: their names distinguish models and layouts.
    """
    if not info.roles:
        return
    if info.block_size != block_size:
        raise StaleError(
            f"node {info.node_id} has blocks of {info.block_size} tokens, this cluster of "
            f"{block_size}: give it the same block_size"
        )
    for other in others:
        if other.node_id != info.node_id and other.layout_id not in ("", info.layout_id):
            raise StaleError(
                f"node {info.node_id} and node {other.node_id} differ in the layout of KV: "
                f"{layout_difference(info.layout_id, other.layout_id)}: give both the same model, "
                "device, block_size, dtype, kv_dtype and quantization (or all mixed_weights)"
            )
