"""The simulated cluster: nodes, links and a clock around the service's own decisions.

Everything that decides is the conductor's (`sim_conductor.py`). Simulated are the nodes with their engines
and caches, the links and time. A request passes

    arrival -> placed -> (fetch) -> queue -> prefill ~ hand-off -> first token -> decode -> end

and each arrow is an event, ordered by moment and then by the order in which
they were made: the same trace and seed give the same run, to the byte.

The view learns what a live conductor's would, when it would: its own placements
at once, first tokens and ends as they happen, KV events `view_delay_s` late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ChainOf
from dataclasses import replace
from itertools import islice
from math import inf

from base.attach import WAKE_DELAY_S
from base.errors import ConfigError
from base.request import NodeId, RequestId, Role
from base.step_budget import GapBounds
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.node_state import bare_node
from conductor.placing.roles import FORGOTTEN_S, STEP_S, RoleChange, RoleController
from conductor.placing.scheduler import place
from conductor.replay.block_cache import make_cache
from conductor.replay.cluster_options import ClusterOptions, NodeSpec
from conductor.replay.events import Events
from conductor.replay.faults import NodeFault
from conductor.replay.links import Flow, Links
from conductor.replay.load_reports import LoadReports
from conductor.replay.outcome import Outcomes, worst_gaps_s
from conductor.replay.pipeline import CHUNK_TOKENS, run_through
from conductor.replay.shared_kv import SharedKv
from conductor.replay.sim_conductor import Placer, SimConductor
from conductor.replay.sim_engine import Chunk, SimEngine
from conductor.replay.sim_node import SimNode
from conductor.replay.sim_request import SimRequest
from conductor.replay.trace import TraceRequest
from kvstore.index import Key

# Requests between two looks at the progress of a run.
WATCH_EVERY = 1_000

Watch = Callable[[float, int], None]


class SimCluster:
    """One run. `run` may be called once."""

    def __init__(self, cost: CostModel, options: ClusterOptions, placer: Placer = place) -> None:
        """`cost` is of one node alone; `placer` may wrap `scheduler.place`, to time or record it."""
        specs = options.nodes(cost.profile)
        self.options = options
        self._alone = cost
        predicted_by = options.believed or options.node_profile(cost.profile)
        self._cost = cost if predicted_by is cost.profile else CostModel(predicted_by)
        self.outcomes = Outcomes(options.block_size, options.node_profile(cost.profile))
        self.now_s = 0.0
        self._events = Events()
        self._at = self._events.at
        self.links = Links(self._at)
        self.samples: list[tuple[float, float, float]] = []
        """(moment, mean seconds of prefill queued, mean decode step) of each sample."""
        self.replicas: list[tuple[float, list[int]]] = []
        """(moment, replicas of each watched block) of each sample."""
        self._block_size = options.block_size
        self._gap_bounds = GapBounds(options.slo.tbt_slo_s, options.slo.longest_gap_slo_s)
        self._conductors = [
            SimConductor(self._cost, each, self._at, self._placed, self._refused, placer)
            for each in (replace(options, seed=options.seed + at) for at in range(options.conductors))
        ]
        self.views = [conductor.view for conductor in self._conductors]
        self._news = [conductor.news for conductor in self._conductors]
        self.view = self.views[0]
        """The view of the conductor that is in control of roles."""
        self.num_events = 0
        """Arrivals and what followed from them, once the run is over."""
        self._arrives_at_s = inf
        self._in_flight: dict[SimRequest, None] = {}
        self._num_turns_to_come = 0
        self._later: Iterator[TraceRequest] | None = None
        """Sessions that begin when others have ended."""
        self._roles = RoleController(self._cost) if options.settings.roles_follow else None
        self._nodes = {spec.node_id: self._node(spec) for spec in specs}
        self._reports = LoadReports(self._nodes, self._conductors, self._block_size, self._at)
        for node in self._nodes.values():
            self._register(node, node.spec.roles)
        if unknown := [fault.node for fault in options.faults if fault.node not in self._nodes]:
            raise ConfigError(f"fault of node {unknown[0]!r}: there is none of that name")

    @property
    def nodes(self) -> list[SimNode]:
        """All nodes, those named p first."""
        return list(self._nodes.values())

    def run(
        self, arrivals: Iterable[TraceRequest], watch: Watch | None = None, sessions: int | None = None
    ) -> None:
        """Serve every request of `arrivals`, which come in order of time, to its end.

        Args:
            watch: Gets the simulated time and the number of requests that arrived, now and then.
            sessions: So many at a time, in order, whatever their times: the next begins when one has ended.
                None: they come when they come.
        """
        if sessions is not None:
            self._later = iter(arrivals)
            arrivals = [row._replace(arrival_s=0.0) for row in islice(self._later, sessions)]
        if self.options.sample_every_s:
            self._at(self.options.sample_every_s, self._sample)
        if self._roles is not None:
            self._at(STEP_S, self._step_roles, self._roles)
        for fault in self.options.faults:
            self._at(fault.at_s, self._node_dies, fault)
        for number, row in enumerate(arrivals):
            self._run_until(row.arrival_s)
            self.now_s = row.arrival_s
            self._arrived(row)
            if watch is not None and not number % WATCH_EVERY:
                watch(self.now_s, number + 1)
        self._run_until(inf)
        for news in self._news:
            news.settle(inf)
        self.num_events = self._events.num_scheduled + self.outcomes.num_arrived

    def _run_until(self, moment_s: float) -> None:
        self._arrives_at_s = moment_s
        moments, run_next = self._events.moments, self._events.run_next
        while moments and moments[0] < moment_s:
            self.now_s = moments[0]
            run_next()

    @property
    def _is_busy(self) -> bool:
        """Whether something will happen that is worth watching."""
        return self._arrives_at_s < inf or self._num_turns_to_come > 0 or self._has_work

    @property
    def _has_work(self) -> bool:
        """Whether a request waits or is under way."""
        return bool(self._in_flight) or any(conductor.num_waiting for conductor in self._conductors)

    # Nodes

    def _node(self, spec: NodeSpec) -> SimNode:
        cost = self._cost if spec.profile is self._cost.profile else CostModel(spec.profile)
        cache = make_cache(self.options.eviction, spec.profile, self.options.block_size)
        engine = SimEngine(
            cost,
            spec.chunk_tokens,
            self._at,
            self._start_prefill,
            self._computed,
            self._finished,
            self.options.step_budgets,
            self.options.max_batch,
        )
        engine.on_look = self._look
        engine.shared = SharedKv(self._block_size, lambda: self._reports.shares(spec.node_id, self.now_s))
        return SimNode(spec, cost, cache, engine)

    def _register(self, node: SimNode, roles: frozenset[Role]) -> None:
        num_blocks = node.spec.profile.device_kv_tokens // self._block_size
        places = self.options.max_batch
        sizes = 0 if places == inf else int(places), node.spec.chunk_tokens
        info = bare_node(node.node_id, roles, num_blocks, self._block_size, node.epoch, *sizes)
        for view in self.views:
            view.add_node(info, self.now_s)
        for news in self._news:
            news.joined(node.node_id)
        self._pump()

    def _pump(self) -> None:
        for conductor in self._conductors:
            conductor.pump(self.now_s)

    def _node_dies(self, fault: NodeFault) -> None:
        node = self._nodes[NodeId(fault.node)]
        if node.node_id not in self.view.node_ids():
            return
        roles = self.view.node(node.node_id).info.roles
        for view in self.views:
            view.remove_node(node.node_id)
        node.cache.clear()
        node.next_event = 1
        node.epoch += 1
        for request in node.engine.evict_all(self.now_s):
            request.num_tokens, request.tokens_left = request.context_tokens, request.steps_left
        for request in list(self._in_flight):
            placement = request.placement
            if node.node_id in (placement.prefill_node, placement.decode_node):
                # what is decoding elsewhere does not need the node that prefilled it
                if placement.decode_node == node.node_id or request.waits_for or request.flow:
                    self._lost(request, node.node_id)
            elif placement.source_node == node.node_id and request.fetching:
                self._stop_flow(request)
                request.fetching = False
                self._nodes[placement.prefill_node].engine.add(request, self.now_s)
        self._pump()
        if fault.for_s < inf:
            self._at(self.now_s + fault.for_s, self._register, node, roles)

    def _lost(self, request: SimRequest, node_id: NodeId) -> None:
        """Let a request that a node lost be tried again, with the tokens that it has."""
        del self._in_flight[request]
        self._stop_flow(request)
        self._nodes[request.placement.prefill_node].engine.drop(request, self.now_s)
        self.outcomes.num_retried += 1
        self._reports.ended(request, self.now_s)
        self._conductors[request.conductor].lost(request, node_id, self.now_s)

    def _stop_flow(self, request: SimRequest) -> None:
        if request.flow is not None:
            self.links.cancel(request.flow, self.now_s)
            request.flow = None

    def _step_roles(self, roles: RoleController) -> None:
        change = roles.step(self.view, self.now_s, self._conductors[0].waiting_s)
        if change is not None:
            self._at(self.now_s + WAKE_DELAY_S, self._has_role, change)
        if self._is_busy:
            due_s = min([self._arrives_at_s, *self._events.moments[:1]])
            idle_s = 0.0 if self._has_work else (due_s - self.now_s - FORGOTTEN_S) // STEP_S * STEP_S
            self._at(self.now_s + max(STEP_S, idle_s), self._step_roles, roles)

    def _has_role(self, change: RoleChange) -> None:
        """Hear from a node that it has the role that it was given."""
        if not self.view.is_member(change.node_id):
            return
        self.view.set_roles(change.node_id, frozenset({change.role}), self.now_s)
        self.outcomes.role_changes += 1
        self._reports.changed(change.node_id, 0, self.now_s)
        self._conductors[0].pump(self.now_s)

    def _sample(self) -> None:
        """Note the load of both pools: mean seconds to the end of the queue, mean predicted step."""
        view = self.view
        prefill = [each.members[slot] for each in self.views for slot in bits_of(each.prefill_mask)]
        decode = [self._nodes[view.members[slot].info.node_id].engine for slot in bits_of(view.decode_mask)]
        queue_s = sum(node.queued_s for node in prefill) / max(1, view.prefill_mask.bit_count())
        step_s = sum(self._cost.decode_step_s(node.batch, node.context_tokens) for node in decode)
        self.samples.append((self.now_s, queue_s, step_s / max(1, len(decode))))
        if self.options.watched_blocks:
            self._news[0].settle(self.now_s)
            holders = view.index.holders
            counts = [holders(block).bit_count() for block in self.options.watched_blocks]
            self.replicas.append((self.now_s, counts))
        if self._is_busy:
            self._at(self.now_s + self.options.sample_every_s, self._sample)

    # The path of one request

    def _arrived(self, row: TraceRequest, is_session: bool = True) -> None:
        number = self.outcomes.num_arrived
        self.outcomes.num_arrived = number + 1
        request = SimRequest(row, number, self.options.output_limit, is_session)
        request.slo, request.gap_bounds = self.options.slo, self._gap_bounds
        if row.bounds is not None:
            request.slo = slo = row.bounds.over(self.options.slo)
            request.gap_bounds = GapBounds(slo.tbt_slo_s, slo.longest_gap_slo_s)
            self.outcomes.named[number] = slo
        request.conductor = number % len(self._conductors)
        self._conductors[request.conductor].ask(request, self.now_s)

    def _placed(self, request: SimRequest) -> None:
        placement = request.placement
        request.waits_for = 1
        self._in_flight[request] = None
        request.order = self.now_s, request.number
        node, source = self._nodes[placement.prefill_node], placement.source_node
        request.found_tokens = tokens = request.num_tokens
        if placement.decode_node != placement.prefill_node:
            self._news[request.conductor].spoke(placement.decode_node, self.now_s)
            here = self._nodes[placement.decode_node].engine.shared.found(request.chain, tokens)
            request.found_tokens = max(here, placement.decode_matched_blocks * self._block_size)
        if source is not None:
            self._news[request.conductor].spoke(source, self.now_s)
            self._fetch(request, node, self._nodes[source])
        else:
            node.engine.add(request, self.now_s)
        self._reports.placed(request, self.now_s)

    def _refused(self, request: SimRequest, reason: str, wasted_prefill_s: float = 0.0) -> None:
        self.outcomes.rejected(request, reason, wasted_prefill_s)
        self._next_turn(request)

    def _fetch(self, request: SimRequest, node: SimNode, source: SimNode) -> None:
        placement = request.placement
        tokens = placement.matched_tokens - placement.local_blocks * self.options.block_size
        num_bytes = tokens * self._cost.profile.kv_token_bytes
        request.fetching = True

        request.flow = Flow(
            source.sends, node.receives, num_bytes, inf, self._fetched, (request, node, source)
        )
        self.links.start(request.flow, self.now_s)

    def _fetched(self, now_s: float, request: SimRequest, node: SimNode, source: SimNode) -> None:
        request.flow = None
        request.fetching = False
        # what the source dropped meanwhile did not come
        blocks = request.chain[: min(request.placement.matched_blocks, source.cache.match(request.chain))]
        self.outcomes.replicas_created += self._store(node, blocks)
        node.engine.add(request, now_s)

    def _look(self, request: SimRequest, chunks: list[Chunk]) -> None:
        """Note what a prompt's node has of it, and whether one of these chunks computes more of it."""
        node, size = self._nodes[request.placement.prefill_node], self._block_size
        request.found_blocks = found = node.cache.match(request.chain)
        request.prefix_tokens = min(found * size, request.num_tokens - 1)
        request.is_held_up = any(_shares(request.chain, *chunk, size) for chunk in chunks)

    def _start_prefill(self, request: SimRequest, now_s: float) -> float:
        """Match a prompt's prefix; return the seconds of its prefill that are in no chunk's step."""
        node = self._nodes[request.placement.prefill_node]
        matched = node.cache.match(request.chain)
        if request.found_blocks is not None:
            matched = min(matched, request.found_blocks)
        matched_tokens, last = matched * self._block_size, request.num_tokens - 1
        request.prefix_tokens = prefix = matched_tokens if matched_tokens < last else last
        new_tokens = request.num_tokens - prefix
        request.prefill_s = prefill_s = node.cost.prefill_s(new_tokens, prefix)
        shown_s = self._shown_load_s(node, request.chain, matched, prefill_s) if node.disk else 0.0
        if node.spec.chunk_tokens:
            # each of its chunks leaves when it is computed
            self._hand_off(request, node, 0.0)
            return node.cost.beside_chunks_s(new_tokens, prefix) + shown_s
        seconds = prefill_s = prefill_s + shown_s
        if node.free_at_s:
            free_at_s, ends_at_s = run_through(node.free_at_s, now_s, self._chunks(request))
            seconds, prefill_s = free_at_s - now_s, ends_at_s - now_s
            if ends_at_s > free_at_s:
                # the first stage is free for the next prompt while later stages work on this one
                request.waits_for += 1
                self._at(ends_at_s, self._left_pipeline, request, request.request_id)
        self._hand_off(request, node, prefill_s)
        return seconds

    def _shown_load_s(self, node: SimNode, chain: ChainOf[Key], matched: int, prefill_s: float) -> float:
        """Return what is seen of loading blocks from disk, layer by layer while others compute."""
        assert node.disk is not None
        tokens = node.disk.num_on_disk(chain, matched) * self.options.block_size
        load_s = self._alone.disk_load_s(tokens)
        return max(0.0, load_s - prefill_s) + min(load_s, prefill_s) / node.spec.profile.num_layers

    def _chunks(self, request: SimRequest) -> list[float]:
        """Return the seconds that one node alone would take for each chunk of a prompt."""
        prefix, end, size = request.prefix_tokens, request.num_tokens, CHUNK_TOKENS
        alone_s = self._alone.prefill_s
        return [alone_s(min(size, end - at), at) for at in range(prefix, end, size)]

    def _left_pipeline(self, request: SimRequest, attempt: RequestId) -> None:
        if request.request_id == attempt:
            self._one_part_done(request)

    def _hand_off(self, request: SimRequest, node: SimNode, prefill_s: float) -> None:
        """Stream the prompt's KV to the decode node while it is computed."""
        placement = request.placement
        request.tail_s = 0.0
        tokens = request.num_tokens - placement.decode_matched_blocks * self._block_size
        stays = placement.prefill_node == placement.decode_node
        if stays or tokens <= 0 or request.tokens_left <= 1:
            return
        request.waits_for += 1
        profile = node.spec.profile
        num_bytes = tokens * profile.kv_token_bytes
        # No layer can leave before it is computed, and the last leaves after all of it:
        # a flow slowed to that pace ends when a streamed hand-off would.
        new_tokens = request.num_tokens - request.prefix_tokens
        request.tail_s = tail_s = node.cost.leaving_s(tokens, new_tokens, request.num_tokens)
        receives, rate = self._nodes[placement.decode_node].receives, num_bytes / (prefill_s + tail_s)
        request.flow = Flow(node.sends, receives, num_bytes, rate, self._handed_off, (request,))
        self.links.start(request.flow, self.now_s)

    def _handed_off(self, now_s: float, request: SimRequest) -> None:
        request.flow = None
        self._one_part_done(request)

    def _computed(self, request: SimRequest, now_s: float) -> None:
        node = self._nodes[request.placement.prefill_node]
        if request.computed_tokens < request.num_tokens:
            self._store(node, request.chain[: request.computed_tokens // self._block_size])
            if node.engine.batch:
                self._news[request.conductor].spoke(node.node_id, now_s)
            self._reports.changed(node.node_id, request.conductor, now_s)
            return
        self._store(node, request.chain, request.evict_first_on == request.placement.prefill_node)
        request.computed_at_s = now_s
        if node.spec.chunk_tokens:
            request.prefill_s = now_s - request.started_at_s
            if request.tail_s and not request.flow:
                # all but the last chunk's KV has come
                self._at(now_s + request.tail_s, self._left_pipeline, request, request.request_id)
                return
        self._one_part_done(request)

    def _one_part_done(self, request: SimRequest) -> None:
        request.waits_for -= 1
        if not request.waits_for:
            self._next_token(request)

    def _next_token(self, request: SimRequest) -> None:
        """The token that prefill makes came: the first, or after a fault the next."""
        now_s, placement = self.now_s, request.placement
        conductor = self._conductors[request.conductor]
        self._news[request.conductor].spoke(placement.prefill_node, now_s, has_computed=True)
        self._reports.went_on(request, now_s)
        if not conductor.was_prefilled(request, now_s):
            del self._in_flight[request]
            self._reports.ended(request, now_s)
            conductor.ended(request, now_s)
            self._refused(request, "tbt_late", request.prefill_s)
            return
        node = self._nodes[placement.decode_node]
        if self.options.decode_caches:
            self._store(node, request.chain, request.evict_first_on == node.node_id)
        if request.first_token_s is None:
            request.first_token_s = now_s
        else:
            request.gaps.append((now_s - request.token_at_s, 1, 0.0))
        request.num_gaps_before = len(request.gaps)
        request.token_at_s = request.prefilled_at_s = now_s
        stays = placement.prefill_node == placement.decode_node
        profile = node.spec.profile
        request.join_s = 0.0 if stays else profile.join_s
        if request.tokens_left <= 1:
            self._finished(request, now_s)
        elif stays:
            node.engine.join(request, now_s)
        elif profile.start_s:
            self._at(now_s + profile.start_s, self._started, request, request.request_id)
        else:
            self._started(request, request.request_id)

    def _started(self, request: SimRequest, attempt: RequestId) -> None:
        """Let a sequence decode. If its node died meanwhile, its first token is made twice."""
        if request.request_id == attempt:
            request.order = self.now_s, request.number
            self._nodes[request.placement.decode_node].engine.join(request, self.now_s)

    def _finished(self, request: SimRequest, now_s: float) -> None:
        del self._in_flight[request]
        self._reports.ended(request, now_s)
        self._conductors[request.conductor].ended(request, now_s, request.tokens_left)
        placement = request.placement
        tbt_s = worst_gaps_s(request.gaps, max(0, request.output_tokens - 1))
        if self.options.on_gaps is not None:
            self.options.on_gaps(request.gaps)
        self.outcomes.completed(request, tbt_s, placement.prefill_node, placement.decode_node, now_s)
        self._next_turn(request)

    def _next_turn(self, request: SimRequest) -> None:
        """Let a session go on, as long after this answer as its user took; after its last, another begin."""
        row, dispatch_s = request.next_turn, self.outcomes.dispatch_s(request.prompt_tokens)
        if row is not None:
            self._come(row, dispatch_s + row.arrival_s, request.is_session)
        elif request.is_session and self._later is not None:
            first = next(self._later, None)
            if first is not None:
                self._come(first, dispatch_s, True)
        for fork in request.forks:
            self._come(fork, dispatch_s + fork.arrival_s, False)

    def _come(self, row: TraceRequest, after_s: float, is_session: bool) -> None:
        self._num_turns_to_come += 1
        arrival_s = self.now_s + after_s
        self._at(arrival_s, self._turn_came, row._replace(arrival_s=arrival_s), is_session)

    def _turn_came(self, row: TraceRequest, is_session: bool) -> None:
        self._num_turns_to_come -= 1
        self._arrived(row, is_session)

    def _store(self, node: SimNode, chain: ChainOf[Key], evict_first: bool = False) -> int:
        """Put blocks into a node's cache; return how many are new."""
        stored, evicted = node.cache.store(chain, evict_first)
        if stored or evicted:
            event = node.next_event, stored, evicted
            node.next_event += len(stored) + len(evicted)
            for news in self._news:
                news.stored(node.node_id, event, self.now_s)
        return len(stored)


def _shares(chain: ChainOf[Key], computing: SimRequest, tokens: int, block_size: int) -> bool:
    """Return whether a prompt has blocks of those that so many tokens of another one fill."""
    first = computing.computed_tokens // block_size
    last = min((computing.computed_tokens + tokens) // block_size, len(computing.chain), len(chain))
    return first < last and computing.chain[first] == chain[first]
