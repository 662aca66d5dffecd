"""A simulated cluster of colocated nodes: each prefills and decodes in the same steps.

What disaggregation is judged against: our own nodes with both roles, placed by
the live scheduler, with what it learns of their pace. It keeps a sequence where its prompt was computed
unless another node's step is shorter; then its KV moves, for as long as the profile says. Nothing is
fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ChainOf
from dataclasses import replace
from math import inf

from base.grants import PeerDescriptor
from base.messages import NodeInfo
from base.request import NodeId, RequestId, Role, Slo
from conductor.placing.admission import admit_to_decode
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import UNBOUNDED, Placement, PlacementRequest
from conductor.placing.prefill_pace import PrefillPace
from conductor.placing.scheduler import place
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from conductor.replay.block_cache import BlockCache
from conductor.replay.events import Events
from conductor.replay.outcome import Outcomes, worst_gaps_s
from conductor.replay.sim_engine import SimEngine
from conductor.replay.sim_node import SimNode
from conductor.replay.sim_request import SimRequest
from conductor.replay.trace import TraceRequest
from kvstore.index import Key


class ColocatedCluster:
    """One run. `run` may be called once."""

    def __init__(
        self,
        cost: CostModel,
        num_nodes: int,
        block_size: int,
        chunk_tokens: int,
        slo: Slo = UNBOUNDED,
        reject: RejectPolicy = RejectPolicy.NONE,
    ) -> None:
        """`slo`: what each request names; `reject`: who is refused for it."""
        # what a request takes beside its prefill was measured on nodes that only prefill
        self._cost = cost = CostModel(replace(cost.profile, request_s=0.0))
        self.outcomes = Outcomes(block_size, cost.profile)
        self.num_nodes = num_nodes
        self.now_s = 0.0
        self.view = ClusterView(cost, block_size)
        self._pace = PrefillPace()
        self._block_size = block_size
        self._slo = slo
        self._settings = SchedulerSettings(reject=reject, fetches=False)
        self._events = Events()
        self._at = self._events.at
        self._nodes: dict[NodeId, SimNode] = {}
        for number in range(num_nodes):
            self._add_node(NodeId(f"c{number}"), chunk_tokens)

    def run(self, arrivals: Iterator[TraceRequest]) -> None:
        """Serve every request of `arrivals`, which come in order of time, to its end."""
        self._next_arrival(arrivals)
        while (next_s := self._events.next_s) < inf:
            self.now_s = next_s
            self._events.run_next()

    def _add_node(self, node_id: NodeId, chunk_tokens: int) -> None:
        size, profile = self._block_size, self._cost.profile
        engine = SimEngine(
            self._cost, chunk_tokens, self._at, self._start_prefill, self._computed, self._finished
        )
        cache = BlockCache(profile.host_kv_tokens // size)
        self._nodes[node_id] = SimNode(node_id, cache, engine, profile.transfer_bytes_per_s)
        info = NodeInfo(
            node_id=node_id,
            epoch=1,
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model_id="",
            layout_id="",
            max_model_len=0,
            num_blocks=profile.device_kv_tokens // size,
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
        """Place a request, or refuse it."""
        now_s, number = self.now_s, self.outcomes.num_arrived
        self.outcomes.num_arrived += 1
        name = RequestId(str(number))
        asked = PlacementRequest(name, row.chain, row.num_tokens, row.output_tokens, self._slo)
        placement = place(asked, self.view, self._cost, now_s, self._settings)
        if not isinstance(placement, Placement):
            self.outcomes.rejected(number, now_s, placement.reason.value, 0.0)
            self._next_turn(row.next_turn)
            return
        self.view.placed(asked, placement, now_s)
        self._pace.placed(placement.prefill_node, now_s)
        request = SimRequest(row, number)
        request.placement = placement
        self._nodes[placement.prefill_node].engine.add(request, now_s)

    def _start_prefill(self, request: SimRequest, now_s: float) -> float:
        """Match a prompt's prefix; return the seconds of its prefill that are in no chunk's step."""
        matched = self._nodes[request.placement.prefill_node].cache.match(request.chain) * self._block_size
        request.prefix_tokens = prefix = min(matched, request.prompt_tokens - 1)
        return self._cost.beside_chunks_s(request.prompt_tokens - prefix, prefix)

    def _computed(self, request: SimRequest, now_s: float) -> None:
        """More of a prompt is there to be found; when all is, it goes on here, or its KV moves first."""
        placement = request.placement
        node_id = placement.prefill_node
        if request.computed_tokens < request.num_tokens:
            self._store(self._nodes[node_id], request.chain[: request.computed_tokens // self._block_size])
            return
        self._store(self._nodes[node_id], request.chain)
        request.prefill_s = now_s - request.started_at_s
        new_tokens = request.prompt_tokens - request.prefix_tokens
        profile_s = self._cost.prefill_s(new_tokens, request.prefix_tokens)
        paced = self._pace.done(node_id, now_s, profile_s, request.prefill_s)
        if paced is not None:
            self.view.corrections.observe(node_id, "prefill", *paced)
        handoff_s = 0.0
        if placement.decode_node != node_id and request.tokens_left > 1:
            tokens = request.prompt_tokens - placement.decode_matched_blocks * self._block_size
            handoff_s = self._cost.handoff_s(tokens, request.prefill_s)
        if handoff_s:
            self._at(now_s + handoff_s, self._first_token, request)
        else:
            self._first_token(request)

    def _first_token(self, request: SimRequest) -> None:
        node = self.view.node(request.placement.decode_node)
        if not admit_to_decode(node, self._cost, request.num_tokens, self._slo, self._settings.reject):
            self.view.finished(request.request_id, self.now_s)
            self.outcomes.rejected(request.number, request.arrival_s, "tbt_late", request.prefill_s)
            self._next_turn(request.next_turn)
            return
        self.view.prefill_done(request.request_id, self.now_s)
        request.first_token_s = request.token_at_s = self.now_s
        if request.tokens_left > 1:
            self._nodes[request.placement.decode_node].engine.join(request, self.now_s)
        else:
            self._finished(request, self.now_s)

    def _finished(self, request: SimRequest, now_s: float) -> None:
        self.view.finished(request.request_id, now_s, request.output_tokens)
        tbt_s = worst_gaps_s(request.gaps, request.output_tokens - 1)
        placement = request.placement
        self.outcomes.completed(request, tbt_s, placement.prefill_node, placement.decode_node, now_s)
        self._next_turn(request.next_turn)

    def _next_turn(self, turn: TraceRequest | None) -> None:
        if turn is not None:
            arrival_s = self.now_s + turn.arrival_s
            self._at(arrival_s, self._begin, turn._replace(arrival_s=arrival_s))

    def _store(self, node: SimNode, chain: ChainOf[Key]) -> None:
        """Put blocks of a prompt into the node's cache and tell the view."""
        stored, evicted = node.cache.store(chain)
        if stored or evicted:
            first_number = node.next_event
            node.next_event += len(stored) + len(evicted)
            self.view.kv_events(node.node_id, first_number, stored, evicted)
