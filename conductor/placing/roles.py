"""Role changes: when a node should prefill instead of decode, or the other way round.

The load of a pool is a share of what its SLO allows: mean queue over the TTFT target; mean
share of the step time that the TBT target leaves for load, or of KV blocks, whichever is
more. A node changes when one pool is overloaded and the other would not be, even with one
node less, and both have been so for a while; then there is a pause. Loads are smoothed,
because arrivals come in bursts and a change costs a drain.

    serves --drain--> takes nothing new --its work ended--> changed role, serves

If the others of its pool are lost before, it stays what it is.

`RoleController.step` only decides; its caller changes the view (and, live, the node). A
drained node keeps its blocks: they are still found, fetched and matched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from base.request import NodeId, Role
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.node_state import NodeState


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """When to change."""

    ttft_target_s: float
    tbt_target_s: float
    overloaded: float = 0.9
    """Load of the pool that gets a node, at least."""
    spare: float = 0.6
    """Load of the pool that gives one, at most, after giving it."""
    hold_s: float = 20.0
    """Seconds for which both hold before a node changes."""
    pause_s: float = 60.0
    """Seconds without another change after one."""
    smoothing_s: float = 15.0


class RoleStep(Enum):
    """A step of a role change."""

    DRAIN = "drain"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class RoleAction:
    """One step of a role change."""

    step: RoleStep
    node_id: NodeId
    role: Role
    """The role that the node is to have."""


class RoleController:
    """Decides role changes, one at a time."""

    def __init__(self, cost: CostModel, settings: RoleSettings) -> None:
        self._cost = cost
        self._settings = settings
        self._loads = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        self._stepped_at_s: float | None = None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0
        self._paused_until_s = 0.0
        self._draining: tuple[NodeState, Role] | None = None

    @property
    def loads(self) -> dict[Role, float]:
        """Smoothed loads of both pools; 1 is all that the targets allow."""
        return dict(self._loads)

    def step(self, view: ClusterView, now_s: float, waiting_s: float = 0.0) -> RoleAction | None:
        """Return what to do now, if anything. Call it every few seconds.

        `waiting_s`: predicted seconds of prefill that are not placed yet.
        """
        self._smooth(view, now_s, waiting_s)
        if self._draining is not None:
            return self._finish(view, now_s)
        wanted = self._needed(view)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_s = wanted, now_s
        held = now_s - self._wanted_since_s >= self._settings.hold_s
        if wanted is None or not held or now_s < self._paused_until_s:
            return None
        node = _cheapest(view, wanted)
        self._draining = (node, wanted)
        return RoleAction(RoleStep.DRAIN, node.info.node_id, wanted)

    def forget(self) -> None:
        """Let go of a change under way: another conductor has taken over."""
        self._draining = self._wanted = None

    def _finish(self, view: ClusterView, now_s: float) -> RoleAction | None:
        assert self._draining is not None
        node, role = self._draining
        if not node.is_member:
            # gone, or attached again and not draining: it would be waited for as long as it has work
            self._draining = None
            return None
        if not (view.decode_mask if role is Role.PREFILL else view.prefill_mask):
            # the others of its pool have gone meanwhile: it stays what it is, at once
            role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        elif node.num_queued or node.foreign_queue_s or node.decode_sequences:
            return None
        self._draining = None
        self._wanted = None
        self._paused_until_s = now_s + self._settings.pause_s
        return RoleAction(RoleStep.CHANGE, node.info.node_id, role)

    def _smooth(self, view: ClusterView, now_s: float, waiting_s: float) -> None:
        passed_s = 0.0 if self._stepped_at_s is None else now_s - self._stepped_at_s
        gain = passed_s / (passed_s + self._settings.smoothing_s)
        self._stepped_at_s = now_s
        for role, load in pool_loads(view, self._cost, self._settings, waiting_s).items():
            self._loads[role] += gain * (load - self._loads[role])

    def _needed(self, view: ClusterView) -> Role | None:
        """Return the role that one more node should have."""
        settings = self._settings
        sizes = {Role.PREFILL: view.prefill_mask.bit_count(), Role.DECODE: view.decode_mask.bit_count()}
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            size = sizes[other]
            if size < 2 or self._loads[role] < settings.overloaded:
                continue
            if self._loads[other] * size / (size - 1) <= settings.spare:
                return role
        return None


def pool_loads(
    view: ClusterView, cost: CostModel, settings: RoleSettings, waiting_s: float = 0.0
) -> dict[Role, float]:
    """Return each pool's load at this moment; 0 for a pool without nodes."""
    prefill = [view.node_at(slot) for slot in bits_of(view.prefill_mask)]
    decode = [view.node_at(slot) for slot in bits_of(view.decode_mask)]
    idle_step_s = cost.decode_step_s(0, 0)
    budget_s = max(1e-9, settings.tbt_target_s - idle_step_s)
    busy = 0.0
    for node in decode:
        step_s = cost.decode_step_s(node.decode_sequences, node.decode_context_tokens)
        blocks = 1.0 - max(0.0, node.free_tokens) / max(1, node.capacity_tokens)
        busy += max((step_s - idle_step_s) / budget_s, blocks)
    queued_s = waiting_s + sum(node.queued_s + node.foreign_queue_s for node in prefill)
    return {
        Role.PREFILL: queued_s / (settings.ttft_target_s * max(1, len(prefill))),
        Role.DECODE: busy / max(1, len(decode)),
    }


def _cheapest(view: ClusterView, wanted: Role) -> NodeState:
    """Return the node of the other pool that is drained soonest, the smaller slot among equals."""
    mask = view.decode_mask if wanted is Role.PREFILL else view.prefill_mask
    nodes = [view.node_at(slot) for slot in bits_of(mask)]
    return min(nodes, key=lambda node: (node.decode_sequences + node.num_queued, node.slot))
