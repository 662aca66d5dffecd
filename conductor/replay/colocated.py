"""A simulated cluster of colocated nodes: each prefills and decodes in the same steps.

What disaggregation is judged against: our own nodes with both roles (`colocated_node.py`), placed by
the live scheduler, with what it learns of their pace. It keeps a sequence where its prompt was computed
unless another node's step is shorter; then its KV moves, for as long as the profile says. Nothing is
fetched, and nobody is refused for time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from base.grants import PeerDescriptor
from base.messages import NodeInfo
from base.request import NodeId, RequestId, Role, Slo
from conductor.cluster_view import ClusterView
from conductor.cost_model import CostModel
from conductor.placement import Placement, PlacementRequest
from conductor.prefill_pace import PrefillPace
from conductor.replay.colocated_node import ColocatedNode, ColocatedSequence
from conductor.replay.events import Events
from conductor.replay.outcome import Outcomes, worst_gaps_s
from conductor.replay.trace import TraceRequest
from conductor.scheduler import place
from conductor.scheduler_settings import RejectPolicy, SchedulerSettings

CHUNK_TOKENS = 512
"""Of prompts in one step; vLLM's smaller setting, which favours TBT."""

SETTINGS = SchedulerSettings(reject=RejectPolicy.NONE, fetches=False)


class ColocatedCluster:
    """One run. `run` may be called once."""

    def __init__(
        self, cost: CostModel, num_nodes: int, block_size: int, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        # what a request takes beside its prefill was measured on nodes that only prefill
        self._cost = cost = CostModel(replace(cost.profile, request_s=0.0))
        self.outcomes = Outcomes(block_size, cost.profile)
        self.num_nodes = num_nodes
        self.now_s = 0.0
        self.view = ClusterView(cost, block_size)
        self._pace = PrefillPace()
        self._block_size = block_size
        self._events = Events()
        self._at = self._events.at
        self._nodes: dict[NodeId, ColocatedNode] = {}
        self._next_event: dict[str, int] = {}
        for number in range(num_nodes):
            self._add_node(NodeId(f"c{number}"), chunk_tokens)

    def run(self, arrivals: Iterator[TraceRequest]) -> None:
        """Serve every request of `arrivals`, which come in order of time, to its end."""
        self._next_arrival(arrivals)
        while (next_s := self._events.next_s) < inf:
            self.now_s = next_s
            self._events.run_next()

    def _add_node(self, node_id: NodeId, chunk_tokens: int) -> None:
        size = self._block_size
        self._nodes[node_id] = ColocatedNode(
            node_id, self._cost, size, chunk_tokens, self._at, self._prefilled, self._finished
        )
        self._next_event[node_id] = 1
        info = NodeInfo(
            node_id=node_id,
            epoch=1,
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model_id="",
            layout_id="",
            max_model_len=0,
            num_blocks=self._cost.profile.device_kv_tokens // size,
            block_size=size,
            peer=PeerDescriptor(node_id, 1, ()),
            host="",
        )
        self.view.add_node(info, 0.0)

    def _next_arrival(self, arrivals: Iterator[TraceRequest]) -> None:
        row = next(arrivals, None)
        if row is not None:
            self._at(row.arrival_s, self._arrived, row, arrivals)

    def _arrived(self, row: TraceRequest, arrivals: Iterator[TraceRequest]) -> None:
        self._next_arrival(arrivals)
        self._begin(row)

    def _begin(self, row: TraceRequest) -> None:
        """Place a request, or refuse it where no node has room."""
        now_s, number = self.now_s, self.outcomes.num_arrived
        self.outcomes.num_arrived += 1
        asked = PlacementRequest(RequestId(str(number)), row.chain, row.num_tokens, row.output_tokens, Slo())
        placement = place(asked, self.view, self._cost, now_s, SETTINGS)
        if not isinstance(placement, Placement):
            self.outcomes.rejected(number, now_s, placement.reason.value, 0.0)
            self._next_turn(row)
            return
        self.view.placed(asked, placement, now_s)
        self._pace.placed(placement.prefill_node, now_s)
        self._nodes[placement.prefill_node].add(ColocatedSequence(row, number, placement), now_s)

    def _prefilled(self, node: ColocatedNode, sequence: ColocatedSequence) -> None:
        """A prompt is done: it goes on here, or its KV moves first."""
        placement = sequence.placement
        self._store(node, sequence)
        new_tokens = sequence.prompt_tokens - sequence.prefix_tokens
        profile_s = self._cost.prefill_s(new_tokens, sequence.prefix_tokens)
        node_id = placement.prefill_node
        paced = self._pace.done(node_id, self.now_s, profile_s, sequence.prefill_s)
        if paced is not None:
            self.view.corrections.observe(node_id, "prefill", *paced)
        handoff_s = 0.0
        if placement.decode_node != node_id and sequence.steps_left:
            tokens = sequence.prompt_tokens - placement.decode_matched_blocks * self._block_size
            handoff_s = self._cost.handoff_s(tokens, sequence.prefill_s)
        if handoff_s:
            self._at(self.now_s + handoff_s, self._first_token, sequence)
        else:
            self._first_token(sequence)

    def _first_token(self, sequence: ColocatedSequence) -> None:
        node = self._nodes[sequence.placement.decode_node]
        self.view.prefill_done(RequestId(str(sequence.number)), self.now_s)
        sequence.first_token_s = self.now_s
        if sequence.steps_left:
            node.join(sequence, self.now_s)
        else:
            self._finished(node, sequence)

    def _finished(self, node: ColocatedNode, sequence: ColocatedSequence) -> None:
        self.view.finished(RequestId(str(sequence.number)), self.now_s, sequence.output_tokens)
        tbt_s = worst_gaps_s(sequence.gaps, sequence.output_tokens - 1)
        prefill_node = sequence.placement.prefill_node
        self.outcomes.completed(sequence, tbt_s, prefill_node, node.name, self.now_s)
        self._next_turn(sequence.row)

    def _next_turn(self, row: TraceRequest) -> None:
        if (turn := row.next_turn) is not None:
            arrival_s = self.now_s + turn.arrival_s
            self._at(arrival_s, self._begin, turn._replace(arrival_s=arrival_s))

    def _store(self, node: ColocatedNode, sequence: ColocatedSequence) -> None:
        """Put a prompt's blocks into the node's cache and tell the view."""
        stored, evicted = node.cache.store(sequence.row.chain)
        if stored or evicted:
            first_number = self._next_event[node.name]
            self._next_event[node.name] += len(stored) + len(evicted)
            self.view.kv_events(NodeId(node.name), first_number, stored, evicted)
