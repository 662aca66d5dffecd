"""Reports of nodes' load, where sequences share blocks or several conductors the nodes.

How many blocks sequences share (`shared_kv.py`) nobody knows but the node, which says so to all conductors.
Beside that each counts its own placements at once, and hears of the others' what a node reports: prompts that
wait, sequences that decode, blocks that are free. A node reports soon after its load changed, and not more
often than `base/attach.py` lets it; of steps that go alike it reports the last. What was placed meanwhile is
not known, and so two conductors may choose the same idle node. One conductor needs no reports where nothing
was ever shared, or room is plenty: nothing happens but by its own placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from base.attach import STATE_GAP_S, WAKE_DELAY_S
from base.messages import Heartbeat
from base.request import NodeId
from conductor.replay.events import Schedule
from conductor.replay.sim_conductor import SimConductor
from conductor.replay.sim_node import SimNode
from conductor.replay.sim_request import SimRequest

Route = tuple[NodeId, int]
"""A node, and the number of a conductor."""


class LoadReports:
    """The reports of all nodes to all conductors, the first of which is in control of roles."""

    def __init__(
        self,
        nodes: Mapping[NodeId, SimNode],
        conductors: Sequence[SimConductor],
        block_size: int,
        schedule: Schedule,
    ) -> None:
        """`schedule`: has something called at a moment."""
        self._nodes = nodes
        self._conductors = conductors
        self._block_size = block_size
        self._schedule = schedule
        self._is_one = self._is_quiet = len(conductors) == 1
        self._sharing: set[NodeId] = set()
        """Nodes where sequences shared blocks."""
        self._due: set[Route] = set()
        self._reported_at_s: dict[Route, float] = {}
        self._to_decode: dict[NodeId, dict[SimRequest, None]] = {node_id: {} for node_id in nodes}
        self._num_reports = 0

    def placed(self, request: SimRequest, now_s: float) -> None:
        """Note a request that its conductor has just placed."""
        if request.placement.decode_node != request.placement.prefill_node:  # else its engine counts it
            self._to_decode[request.placement.decode_node][request] = None
        if not self._is_quiet:
            self.went_on(request, now_s)

    def ended(self, request: SimRequest, now_s: float) -> None:
        """Note that an attempt is over."""
        self._to_decode[request.placement.decode_node].pop(request, None)
        if not self._is_quiet:
            self.went_on(request, now_s)

    def went_on(self, request: SimRequest, now_s: float) -> None:
        """Note that its nodes have another load by a request."""
        if self._is_quiet:
            return
        placement = request.placement
        self.changed(placement.prefill_node, request.conductor, now_s)
        if placement.decode_node != placement.prefill_node:
            self.changed(placement.decode_node, request.conductor, now_s)

    def shares(self, node_id: NodeId, now_s: float) -> None:
        """Note that a sequence holds blocks of others on a node."""
        self._sharing.add(node_id)
        self._is_quiet = False
        self.changed(node_id, None, now_s)

    def changed(self, node_id: NodeId, by: int | None, now_s: float) -> None:
        """Have a node report soon to the conductors that do not know yet.

        The one who had it changed (None: nobody) knows all but what is shared.
        """
        if self._is_quiet:
            return
        shares = node_id in self._sharing
        for number, conductor in enumerate(self._conductors):
            route = node_id, number
            is_new = number != by and not self._is_one
            if route not in self._due and (is_new or (shares and _wants_room(conductor, node_id))):
                self._due.add(route)
                earliest_s = self._reported_at_s.get(route, 0.0) + STATE_GAP_S
                at_s = max(now_s + WAKE_DELAY_S, earliest_s)
                self._schedule(at_s, self._report, route, at_s)

    def _report(self, route: Route, now_s: float) -> None:
        node_id, number = route
        self._due.discard(route)
        self._reported_at_s[route] = now_s
        conductor = self._conductors[number]
        if conductor.view.is_member(node_id):
            has_news = conductor.view.heartbeat(node_id, self._heartbeat(self._nodes[node_id]), now_s)
            if has_news and conductor.num_waiting:
                conductor.pump(now_s)

    def _heartbeat(self, node: SimNode) -> Heartbeat:
        engine, coming = node.engine, self._to_decode[node.node_id]
        shared, shared_tokens = engine.shared, engine.shared.tokens
        context_tokens = engine.context_tokens
        left = engine.capacity_tokens + shared_tokens - context_tokens - engine.prompt_tokens
        for each in engine.joining:
            found = shared.found(each.chain, each.found_tokens)
            # who has decoded already was preempted: its KV is in host memory
            if each.context_tokens == each.num_tokens <= left + found:
                context_tokens += each.num_tokens
                shared_tokens += found
                left -= each.num_tokens - found
        # what there is no room for stays where it was computed
        reserved = 0
        for each in coming:
            if each.waits_for:
                found = shared.found(each.chain, each.found_tokens)
                reserved += each.num_tokens - found
                shared_tokens += found
        held = engine.capacity_tokens - left + min(left, reserved)
        self._num_reports += 1
        return Heartbeat(
            sequence=self._num_reports,
            num_free_blocks=max(0, engine.capacity_tokens - held) // self._block_size,
            num_held_blocks=held // self._block_size,
            num_shared_blocks=shared_tokens // self._block_size,
            num_waiting=engine.num_waiting,
            num_running=engine.batch + engine.num_prompts,
            num_queued_tokens=engine.queued_tokens,
            num_context_tokens=context_tokens,
            roles=self._conductors[0].view.node(node.node_id).info.roles,
            num_step_rows=engine.batch + len(engine.joining),
        )


def _wants_room(conductor: SimConductor, node_id: NodeId) -> bool:
    """Return whether a conductor may place more on a node if it learns what sequences share there.

    Where it counts less than half of a node's KV as taken, by whole contexts, it seldom does.
    """
    if not conductor.view.is_member(node_id):
        return False
    node = conductor.view.node(node_id)
    return conductor.num_waiting > 0 or 2 * node.peak_tokens >= node.capacity_tokens
