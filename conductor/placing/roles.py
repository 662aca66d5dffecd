"""Roles that follow load: which nodes prefer prompts, and which prefer to decode.

Any node does both at any moment, in steps that take of prompts what those who decode can bear
(`base/step_budget.py`). Its role only says what placement gives it while its pool has time and room;
`lent_decode.py` and `inline_prefill.py` say what it is given beyond. So a change is an order, and nothing
else: no drain, no reload; what the node has goes on, and its blocks are found where they are.

    load of the prefill pool = (seconds of prefill that come a second + seconds waiting / QUEUE_S) / its nodes
    load of the decode pool = (sum over all nodes of what they decode, as a share of what its bounds and their
                              blocks allow / BORNE) / its nodes

Seconds that a step takes for any prompt are left out: several short prompts share them.
What a node computes does not wait: one prompt of 60,000 tokens is no queue, however long it takes.

The more loaded pool bounds goodput. So a node drifts to it where, at the best split, the more loaded of both
would be less loaded by GAIN at least: where load is balanced nothing changes, and nothing goes to and fro. It
is the best split that is compared, not the next one, so that many nodes follow as few do. A change leaves
demands nearly as they are, and so the next one needs no pause.

`RoleController.step` only decides; its caller asks the node, and the view changes when the node reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from base.request import NodeId, Role
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.node_state import NodeState
from conductor.placing.prompt_share import decode_load

STEP_S = 1.0
"""Seconds between two looks."""

QUEUE_S = 2.0
"""A queue of so many seconds counts as much as a node that computes all the time."""

SMOOTHING_S = 3.0
"""Arrivals come in bursts; what is shorter is answered by placement alone."""

FORGOTTEN_S = 128.0
"""Seconds after which looks every `STEP_S` have kept no bit of what was seen."""

HOLD_S = 1.0
"""Seconds for which a change must be wanted."""

BORNE = 2.0 / 3.0
"""Share of its bounds at which a decode node is as loaded as a prefill node that computes all the time.

Prompts wait for each other, or go to a decode node. Sequences cannot: where a node decodes more of them than
others, they are late, and that begins before the mean of all nodes comes near the bounds.
"""

BUSY = 1.0
"""Load of one pool at least: below it a change gains nothing that a request could see."""

GAIN = 0.3
"""Share by which the more loaded pool must be less loaded at the best split.

Both demands are more where a pool queues: with less, each of two splits can look worse than the other.
"""

MOST_LOAD = 4.0
"""Load of a node whose bounds leave it no time; a node for each of its sequences is the most that helps."""

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A node that is to prefer another role."""

    node_id: NodeId
    role: Role


class RoleController:
    """Decides role changes, one at a time."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._demands = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        self._stepped_at_s: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def step(self, view: ClusterView, now_s: float, waiting_s: float = 0.0) -> RoleChange | None:
        """Return what to change now, if anything. Call it every `STEP_S`.

        `waiting_s`: predicted seconds of prefill that are not placed yet.
        """
        self._smooth(view, now_s, waiting_s)
        wanted = self._needed(view)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now_s
        if wanted is None or now_s - self._wanted_since_s < HOLD_S:
            return None
        self._wanted = None
        return RoleChange(_cheapest(view, wanted).info.node_id, wanted)

    def forget(self) -> None:
        """Let go of what was seen: another conductor decides."""
        self._stepped_at_s = self._wanted = None
        self._demands = dict.fromkeys(self._demands, 0.0)

    def _smooth(self, view: ClusterView, now_s: float, waiting_s: float) -> None:
        before_s, self._stepped_at_s = self._stepped_at_s, now_s
        if before_s is None or now_s <= before_s:
            return
        passed_s = now_s - before_s
        # other conductors place as many prompts for each sequence that decodes as this one does
        own = view.running_sequences - view.foreign_sequences
        come = view.prefill_demand.at(now_s) * (view.running_sequences / own if own > 0 else 1.0)
        prefill = [view.members[slot] for slot in bits_of(view.prefill_mask)]
        queued_s = waiting_s + sum(_waiting_s(node) for node in prefill)
        decoding = decode_demand(view, self._cost) / BORNE
        found = {Role.PREFILL: come + queued_s / QUEUE_S, Role.DECODE: decoding}
        gain = passed_s / (passed_s + SMOOTHING_S)
        for role, demand in found.items():
            self._demands[role] += gain * (demand - self._demands[role])

    def _needed(self, view: ClusterView) -> Role | None:
        """Return the role that one more node should have."""
        prefill, decode = self._demands[Role.PREFILL], self._demands[Role.DECODE]
        sizes = {Role.PREFILL: view.prefill_mask.bit_count(), Role.DECODE: view.decode_mask.bit_count()}
        if not all(sizes.values()):
            # the last one of a role died: who is to do its work is not asked twice
            return next((role for role in OTHER if not sizes[role] and sizes[OTHER[role]] > 1), None)
        now = max(prefill / sizes[Role.PREFILL], decode / sizes[Role.DECODE])
        best, wanted = (1.0 - GAIN) * now, None
        for role, other in OTHER.items():
            most = min(_givers(view, role).bit_count(), sizes[other] - 1) if now >= BUSY else 0
            for count in range(1, most + 1):
                after = {role: sizes[role] + count, other: sizes[other] - count}
                load = max(prefill / after[Role.PREFILL], decode / after[Role.DECODE])
                if load < best:
                    best, wanted = load, role
        return wanted


def _waiting_s(node: NodeState) -> float:
    """Return the predicted seconds of a node's prompts that wait for the one before them."""
    return node.behind_s + node.foreign_queue_s


def decode_demand(view: ClusterView, cost: CostModel) -> float:
    """Return how many nodes there is decoding for: each node's share of what its bounds and blocks allow."""
    return sum(
        min(MOST_LOAD, node.decode_sequences, decode_load(node, cost))
        for node in view.nodes()
        if node.decode_sequences
    )


def _givers(view: ClusterView, wanted: Role) -> int:
    """Return the nodes that have the other role alone."""
    masks = {Role.PREFILL: view.prefill_mask, Role.DECODE: view.decode_mask}
    return masks[OTHER[wanted]] & ~masks[wanted]


def _cheapest(view: ClusterView, wanted: Role) -> NodeState:
    """Return the node that has most of the wanted work already, and the least of the other."""
    nodes = [view.members[slot] for slot in bits_of(_givers(view, wanted))]

    def other_work(node: NodeState) -> tuple[float, float, int]:
        prompts, sequences = node.queued_s + node.foreign_queue_s, node.decode_sequences
        is_prefill = wanted is Role.PREFILL
        return (sequences, -prompts, node.slot) if is_prefill else (-sequences, prompts, node.slot)

    return min(nodes, key=other_work)
