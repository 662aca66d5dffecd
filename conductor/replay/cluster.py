"""The simulated cluster: nodes, links and a clock around the live scheduler.

Everything that decides is the live conductor's: `place`, admission, the view and its
index. Simulated are the prefill queues with their caches, the decode batches, the links
and time. A request passes

    arrival -> placed -> (fetch) -> queue -> prefill ~ hand-off -> first token -> decode -> end

and each arrow is an event in one heap, ordered by moment and then by the order in which
they were made: the same trace and seed give the same run, to the byte.

The view is told what a live conductor would be told, when it would be: its own placements
at once, first tokens and ends as they happen, KV events `view_delay_s` late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ChainOf
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from base.request import NodeId, RequestId, Role, Slo
from conductor.admission import RejectPolicy, admit_to_decode
from conductor.cluster_view import ClusterView, NodeInfo
from conductor.cost_model import CostModel
from conductor.placement import Placement, PlacementRequest, Rejection
from conductor.replay.block_cache import BlockCache
from conductor.replay.decode_node import DecodeNode, Sequence
from conductor.replay.links import Flow, Link, Links
from conductor.replay.outcome import Outcomes
from conductor.replay.policies import prefill_policy
from conductor.replay.trace import TraceRequest
from conductor.scheduler import PrefillPolicy, SchedulerSettings, place
from kvstore.index import Key


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The cluster to simulate and how it places."""

    prefill_nodes: int
    decode_nodes: int
    block_size: int
    policy: str = "global"
    reject: RejectPolicy = RejectPolicy.NONE
    slo: Slo = field(default_factory=Slo)
    kvcache_balancing_threshold: float | None = None
    view_delay_s: float = 0.0
    output_limit: int | None = None
    """Cuts every output; 1 is prefill alone."""
    sample_every_s: float = 0.0
    """Record the load of both pools so often; 0: never."""
    seed: int = 0


Placer = Callable[
    [PlacementRequest, ClusterView, CostModel, float, SchedulerSettings, PrefillPolicy],
    Placement | Rejection,
]


class SimRequest:
    """One request on its way."""

    __slots__ = (
        "arrival_s",
        "chain",
        "decode",
        "fetching",
        "first_token_s",
        "num_tokens",
        "output_tokens",
        "placement",
        "prefill_s",
        "prefix_tokens",
        "request_id",
        "started_at_s",
        "waits_for",
    )

    def __init__(self, row: TraceRequest, request_id: RequestId, output_tokens: int) -> None:
        self.request_id = request_id
        self.arrival_s = row.arrival_s
        self.num_tokens = row.num_tokens
        self.output_tokens = output_tokens
        self.chain = row.chain
        self.placement: Placement
        self.fetching = False
        self.waits_for = 0
        self.first_token_s = 0.0
        self.started_at_s = 0.0
        self.prefill_s = 0.0
        self.prefix_tokens = 0


class PrefillNode:
    """A queue in order of arrival, one prompt at a time, and a cache in host memory."""

    __slots__ = ("busy_s", "cache", "next_event", "node_id", "queue", "receives", "running", "sends")

    def __init__(self, node_id: NodeId, cache_blocks: int, link_rate: float) -> None:
        self.node_id = node_id
        self.cache = BlockCache(cache_blocks)
        self.queue: deque[SimRequest] = deque()
        self.running: SimRequest | None = None
        self.sends = Link(link_rate)
        self.receives = Link(link_rate)
        self.busy_s = 0.0
        self.next_event = 1

    def take_ready(self) -> SimRequest | None:
        """Return and dequeue the first request whose blocks have come."""
        for at, request in enumerate(self.queue):
            if not request.fetching:
                del self.queue[at]
                return request
        return None


class Cluster:
    """One run. `run` may be called once."""

    def __init__(self, cost: CostModel, options: ClusterOptions, placer: Placer = place) -> None:
        """`placer` may wrap `scheduler.place`, to time or record it."""
        self.options = options
        self._place = placer
        self.outcomes = Outcomes(options.block_size)
        self.view = ClusterView(cost, options.block_size)
        self.now_s = 0.0
        self.num_events = 0
        self.links = Links(self._at)
        self.samples: list[tuple[float, float, float]] = []
        """(moment, mean seconds of prefill queued, mean decode step) of each sample."""
        self._cost = cost
        self._settings = SchedulerSettings(
            reject=options.reject,
            fetches=options.policy == "global",
            kvcache_balancing_threshold=options.kvcache_balancing_threshold,
        )
        self._choose_prefill = prefill_policy(options.policy, options.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._arrivals: Iterator[TraceRequest] = iter(())
        self._prefill: dict[NodeId, PrefillNode] = {}
        self._decode: dict[NodeId, DecodeNode[SimRequest]] = {}
        self._receives: dict[NodeId, Link] = {}
        self._build()

    @property
    def prefill_nodes(self) -> list[PrefillNode]:
        """The prefill nodes, in order."""
        return list(self._prefill.values())

    @property
    def decode_nodes(self) -> list[DecodeNode[SimRequest]]:
        """The decode nodes, in order."""
        return list(self._decode.values())

    def run(self, arrivals: Iterator[TraceRequest]) -> None:
        """Serve every request of `arrivals`, which come in order of time, to its end."""
        self._arrivals = arrivals
        self._next_arrival()
        if self.options.sample_every_s:
            self._at(self.options.sample_every_s, self._sample)
        events = self._events
        while events:
            now_s, _, call, arguments = heappop(events)
            self.now_s = now_s
            self.num_events += 1
            call(*arguments)

    # Building

    def _build(self) -> None:
        profile = self._cost.profile
        size = self.options.block_size
        rate = profile.transfer_bytes_per_s
        device_blocks = profile.device_kv_tokens // size
        for number in range(self.options.prefill_nodes):
            node_id = NodeId(f"p{number}")
            self._prefill[node_id] = PrefillNode(node_id, profile.host_kv_tokens // size, rate)
            info = NodeInfo(node_id, 1, frozenset({Role.PREFILL}), device_blocks, size)
            self.view.add_node(info, 0.0)
        for number in range(self.options.decode_nodes):
            node_id = NodeId(f"d{number}")
            self._decode[node_id] = DecodeNode(self._cost, profile.device_kv_tokens, self._at, self._finished)
            self._receives[node_id] = Link(rate)
            info = NodeInfo(node_id, 1, frozenset({Role.DECODE}), device_blocks, size)
            self.view.add_node(info, 0.0)

    def _at(self, moment_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._num_scheduled += 1
        heappush(self._events, (moment_s, self._num_scheduled, call, arguments))

    def _sample(self) -> None:
        """Note the load of both pools: mean seconds to the end of the queue, mean predicted step."""
        view, prefill, decode = self.view, self.prefill_nodes, self.decode_nodes
        queue_s = sum(max(0.0, view.node(node.node_id).queued_s) for node in prefill)
        step_s = sum(self._cost.decode_step_s(node.batch, node.context_tokens) for node in decode)
        self.samples.append((self.now_s, queue_s / len(prefill), step_s / len(decode)))
        if self._events:
            self._at(self.now_s + self.options.sample_every_s, self._sample)

    # The path of one request

    def _next_arrival(self) -> None:
        row = next(self._arrivals, None)
        if row is not None:
            self._at(row.arrival_s, self._arrived, row)

    def _arrived(self, row: TraceRequest) -> None:
        self._next_arrival()
        output_tokens = min(row.output_tokens, self.options.output_limit or row.output_tokens)
        request = SimRequest(row, RequestId(str(self.outcomes.num_arrived)), output_tokens)
        self.outcomes.arrived()
        asked = PlacementRequest(
            request.request_id, request.chain, request.num_tokens, request.output_tokens, self.options.slo
        )
        placement = self._place(
            asked, self.view, self._cost, self.now_s, self._settings, self._choose_prefill
        )
        if not isinstance(placement, Placement):
            self.outcomes.rejected(placement.reason.value, 0.0)
            return
        self.view.placed(asked, placement, self.now_s)
        request.placement = placement
        node = self._prefill[placement.prefill_node]
        if placement.source_node is not None:
            self._fetch(request, node, self._prefill[placement.source_node], placement)
        node.queue.append(request)
        if node.running is None:
            self._start_prefill(node)

    def _fetch(
        self, request: SimRequest, node: PrefillNode, source: PrefillNode, placement: Placement
    ) -> None:
        tokens = placement.matched_tokens - placement.local_blocks * self.options.block_size
        num_bytes = tokens * self._cost.profile.kv_token_bytes
        request.fetching = True

        def fetched(now_s: float) -> None:
            request.fetching = False
            # what the source dropped meanwhile did not come
            blocks = request.chain[: min(placement.matched_blocks, source.cache.match(request.chain))]
            stored = self._store(node, blocks)
            self.outcomes.replicas_created += stored
            if node.running is None:
                self._start_prefill(node)

        self.links.start(Flow(source.sends, node.receives, num_bytes, inf, fetched), self.now_s)

    def _start_prefill(self, node: PrefillNode) -> None:
        request = node.take_ready()
        if request is None:
            return
        node.running = request
        size = self.options.block_size
        request.prefix_tokens = min(node.cache.match(request.chain) * size, request.num_tokens - 1)
        request.started_at_s = self.now_s
        new_tokens = request.num_tokens - request.prefix_tokens
        request.prefill_s = self._cost.prefill_s(new_tokens, request.prefix_tokens)
        node.busy_s += request.prefill_s
        self._hand_off(request, node)
        self._at(self.now_s + request.prefill_s, self._prefilled, request, node)

    def _hand_off(self, request: SimRequest, node: PrefillNode) -> None:
        """Stream the prompt's KV to the decode node while it is computed."""
        placement = request.placement
        tokens = request.num_tokens - placement.decode_matched_blocks * self.options.block_size
        request.waits_for = 1
        if tokens <= 0 or request.output_tokens <= 1:
            return
        request.waits_for = 2
        num_bytes = tokens * self._cost.profile.kv_token_bytes
        # No layer can leave before it is computed, and the last leaves after all of it:
        # a flow slowed to that pace ends when a streamed hand-off would.
        tail_s = self._cost.transfer_s(tokens) / self._cost.profile.num_layers
        limit = num_bytes / (request.prefill_s + tail_s)
        receives = self._receives[placement.decode_node]

        def arrived(now_s: float) -> None:
            self._one_part_done(request)

        self.links.start(Flow(node.sends, receives, num_bytes, limit, arrived), self.now_s)

    def _prefilled(self, request: SimRequest, node: PrefillNode) -> None:
        node.running = None
        self._store(node, request.chain)
        self._one_part_done(request)
        if node.running is None:
            self._start_prefill(node)

    def _one_part_done(self, request: SimRequest) -> None:
        request.waits_for -= 1
        if not request.waits_for:
            self._first_token(request)

    def _first_token(self, request: SimRequest) -> None:
        now_s = self.now_s
        request.first_token_s = now_s
        decode_id = request.placement.decode_node
        options = self.options
        if options.reject is not RejectPolicy.NONE:
            state = self.view.node(decode_id)
            if not admit_to_decode(state, self._cost, request.num_tokens, options.slo):
                self.view.finished(request.request_id, now_s)
                self.outcomes.rejected("tbt_late", request.prefill_s)
                return
        self.view.prefill_done(request.request_id, now_s)
        sequence = Sequence(request, request.num_tokens, request.output_tokens - 1, now_s)
        if request.output_tokens <= 1:
            self._finished(sequence, now_s)
        else:
            self._decode[decode_id].join(sequence, now_s)

    def _finished(self, sequence: Sequence[SimRequest], now_s: float) -> None:
        request = sequence.owner
        self.view.finished(request.request_id, now_s, request.output_tokens)
        self.outcomes.completed(
            ttft_s=request.first_token_s - request.arrival_s,
            tbt_s=sequence.worst_gaps_s(),
            num_tokens=request.num_tokens,
            prefix_tokens=request.prefix_tokens,
            prefill_s=request.prefill_s,
            queue_s=request.started_at_s - request.arrival_s,
        )

    def _store(self, node: PrefillNode, chain: ChainOf[Key]) -> int:
        """Put blocks into a node's cache and tell the view; return how many are new."""
        stored, evicted = node.cache.store(chain)
        if not stored and not evicted:
            return 0
        first_number = node.next_event
        node.next_event += len(stored) + len(evicted)
        if self.options.view_delay_s:
            told_at_s = self.now_s + self.options.view_delay_s
            self._at(told_at_s, self._tell, node.node_id, first_number, stored, evicted)
        else:
            self.view.kv_events(node.node_id, first_number, stored, evicted)
        return len(stored)

    def _tell(self, node_id: NodeId, first_number: int, stored: ChainOf[Key], evicted: list[Key]) -> None:
        self.view.kv_events(node_id, first_number, stored, evicted)
