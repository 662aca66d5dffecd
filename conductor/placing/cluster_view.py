"""Cluster view: what the conductor believes of its nodes, kept by events.

Three sources, each for what it alone knows:

* the conductor's own placements, at once: a burst is spread although no node has
  reported yet. A placed request adds its predicted seconds to the prefill node's queue and
  its tokens to the decode node, and takes them away again when it moves on;
* heartbeats, every two seconds: blocks that are free, and load that is not ours (another
  conductor's), which is what they report beyond our own account;
* KV events: which blocks each node holds, in the prefix index.

Nodes have small numbers (slots) so that sets of them are bit masks. A slot is reused
after its node left; everything that outlives a node refers to its `NodeState`, never to
its slot.

Pure state: no I/O, no clock (`now_s` comes with each event). The live conductor and
replay drive this very class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf, nan

from base.messages import Heartbeat, NodeInfo
from base.request import NodeId, RequestId, Role
from conductor.placing.copy_price import CopyPrice
from conductor.placing.cost_model import Corrections, CostModel
from conductor.placing.decode_projection import DecodeProjection
from conductor.placing.fading_rate import FadingRate
from conductor.placing.load_order import LoadOrder, bits_of
from conductor.placing.node_state import InFlight, NodeState, require_same_kv
from conductor.placing.pace_classes import PaceClasses
from conductor.placing.passed_time import PassedTime
from conductor.placing.placement import Placement, PlacementRequest, RejectReason
from conductor.placing.room_price import RoomPrice
from kvstore.index import Key, NodeEvents, PrefixIndex

# Of outputs seen so far; a new request is expected to be as long, up to its max_tokens.
OUTPUT_GAIN = 0.02
INITIAL_OUTPUT_TOKENS = 256.0
# Of prompts placed so far: the next one is expected to take as long to compute.
PROMPT_GAIN = 0.01
# A decode node that computes a prompt counts as one with steps this much longer: who joins makes it later.
COMPUTES_TOO = 1.5
# Of the last few stored prompts, in how much they made a node evict.
EVICT_GAIN = 0.2

# Stays below any need, whatever is given back before the node's next heartbeat.
NO_ROOM = -1e15
# What a node refused, its heartbeat of the same moment may not show: blocks can be promised.
FULL_S = 0.25


class ClusterView:
    """Membership, load and block locations of the whole cluster."""

    def __init__(self, cost: CostModel, block_size: int) -> None:
        """`block_size` is that of the chains and of every node."""
        self.block_size = block_size
        self.index = PrefixIndex()
        self.copy_price = CopyPrice(self.index)
        self.room_price = RoomPrice()
        self.corrections = Corrections()
        self.paces = PaceClasses()
        self.prefill_order = LoadOrder()
        self.decode_order = LoadOrder()
        self.prefill_mask = 0
        self.num_prefill = 1  # nodes of that mask, or 1 where there is none: seconds are divided by it
        self.decode_mask, self.decode_places = 0, inf  # and places in a step of the mean decode node
        self.lent_mask = 0  # prefill nodes that decode all the same (`lent_decode.py`)
        self.members: dict[int, NodeState] = {}
        """The nodes that are attached now, by slot."""
        self.projection = DecodeProjection(INITIAL_OUTPUT_TOKENS, cost.empty_step_s)
        self.running_sequences = 0
        self.running_context_tokens = 0.0
        self.foreign_sequences: float = 0
        """Running sequences of other conductors, by heartbeats."""
        self.foreign_context_tokens: float = 0
        self.num_in_flight = 0
        """Requests placed and not finished."""
        self.num_queued = 0
        """Prompts placed and not computed."""
        self.num_waiting = 0
        """Requests that are not placed yet: their owner says how many."""
        self.on_running: Callable[[NodeState, float], None] | None = None  # what decodes on a node changed
        self.mean_output_tokens = INITIAL_OUTPUT_TOKENS
        self.mean_prefill_s = 0.0
        """Predicted seconds of a prompt, on a node that does nothing else, over those placed lately."""
        self.prefill_demand = FadingRate()
        """Predicted seconds of prefill placed a second, of nodes that do nothing else. What a step takes for
        any prompt is left out: several share it."""
        self._cost = cost
        self._nodes: dict[NodeId, NodeState] = {}
        self._in_flight: dict[RequestId, InFlight] = {}

    # Membership

    def add_node(self, info: NodeInfo, now_s: float) -> NodeState:
        """Admit a node; one of the same name and another epoch is replaced.

        Raises:
            StaleError: its KV does not fit the other nodes'; the message says how. Nothing is changed."""
        self.require_compatible(info)
        if info.node_id in self._nodes:
            self.remove_node(info.node_id)
        slot = next(slot for slot in count() if slot not in self.members)
        tokens = info.num_blocks * info.block_size
        events, learned = NodeEvents(self.index, slot), self.corrections.of(info.node_id)
        passed, places = PassedTime(now_s), info.max_batch or inf
        node = NodeState(info, slot, events, learned, passed, tokens, float(tokens), places)
        self.members[slot] = self._nodes[info.node_id] = node
        self._refresh_roles(node, now_s)
        return node

    def require_compatible(self, info: NodeInfo) -> None:
        """Raise StaleError if the node's KV cannot be exchanged with the other nodes'."""
        require_same_kv(info, [node.info for node in self._nodes.values()], self.block_size)

    def remove_node(self, node_id: NodeId) -> None:
        """Forget a node; requests placed on it stay in the account until `finished`."""
        if (node := self._nodes.pop(node_id, None)) is None:
            return
        node.is_member = False
        self._note_foreign(node, None, 0.0)
        self._refresh_roles(node, 0.0)
        del self.members[node.slot]
        self.index.remove_node(node.slot)
        self.paces.remove(node.slot)
        self.corrections.forget(node_id)

    def set_roles(self, node_id: NodeId, roles: frozenset[Role], now_s: float) -> None:
        """Give a node other roles; what it holds and does goes on."""
        node = self._nodes[node_id]
        node.info = replace(node.info, roles=roles)
        self._refresh_roles(node, now_s)

    def missing_role(self, decodes: bool = True) -> str | None:
        """Return the name of a role without a node that a request needs, which decodes or does not."""
        if not self.prefill_mask:
            return Role.PREFILL.value
        return Role.DECODE.value if decodes and not self.decode_mask else None

    def node(self, node_id: NodeId) -> NodeState:
        """Return a member; raises KeyError for any other."""
        return self._nodes[node_id]

    def is_member(self, node_id: NodeId) -> bool:
        """Return whether a node is attached now."""
        return node_id in self._nodes

    def mask_of(self, node_ids: Sequence[NodeId]) -> int:
        """Return the slots of those that are members."""
        mask = 0
        for node_id in node_ids:
            if node := self._nodes.get(node_id):
                mask |= 1 << node.slot
        return mask

    def nodes(self) -> list[NodeState]:
        """Return the members, in the order of their slots."""
        return [self.members[slot] for slot in sorted(self.members)]

    def node_ids(self) -> list[NodeId]:
        """Return the members, in the order they came."""
        return list(self._nodes)

    def load_of(self, node_id: NodeId, now_s: float) -> tuple[float, float]:
        """Return the predicted seconds of a member's queue of prompts and of a token of who decodes there.

        NaN where it has not the role, or takes nothing more."""
        slot = self._nodes[node_id].slot
        queue_s = step_s = nan
        if self.prefill_mask >> slot & 1:
            queue_s = max(0.0, self.prefill_order.values[slot] - now_s)
        if self.decode_mask >> slot & 1:
            step_s = self._step_s(self.members[slot])
        return queue_s, step_s

    # What nodes report

    def heartbeat(self, node_id: NodeId, beat: Heartbeat, now_s: float) -> bool:
        """Take in a member's report; return whether it has news, by which who waits may be placed."""
        node = self._nodes[node_id]
        known = node.heard
        node.events.reached(beat.next_kv_event)
        # of what we count, which another conductor's are no part of
        node.shared_tokens = min(float(beat.num_shared_blocks * self.block_size), node.peak_tokens)
        if now_s >= node.full_until_s:
            node.reported_free_tokens = float(beat.num_free_blocks * self.block_size)
        foreign_s = self._foreign_queue_s(node, beat)
        self._note_foreign(node, beat, now_s)
        roles = beat.roles or node.info.roles
        if beat.is_draining != node.is_draining or roles != node.info.roles:
            node.is_draining = beat.is_draining
            self.set_roles(node_id, roles, now_s)
        if self.prefill_mask >> node.slot & 1:
            # the prefill under way is part done: our own queue goes on ending when it did
            ours_ends_s = self.prefill_order.values[node.slot] - node.foreign_queue_s
            self.prefill_order.set(node.slot, max(now_s, ours_ends_s) + foreign_s)
        node.foreign_queue_s = foreign_s
        self._reorder(node)
        return node.heard != known

    def kv_events(
        self,
        node_id: NodeId,
        first_number: int,
        stored: Sequence[Key],
        removed: Sequence[Key],
        is_snapshot: bool = False,
    ) -> bool:
        """Apply a node's KV events; False where some were lost and a snapshot is awaited."""
        node = self._nodes.get(node_id)
        if node is None or not node.events.apply(first_number, stored, removed, is_snapshot):
            return False
        if stored and not is_snapshot:
            share = min(1.0, len(removed) / len(stored))
            node.evict_share += EVICT_GAIN * (share - node.evict_share)
        if removed:
            self.copy_price.evicted(removed)
        return True

    def awaits_snapshot(self, node_id: NodeId) -> bool:
        """Return whether KV events of a node were lost, so that it has to list all its blocks anew."""
        node = self._nodes.get(node_id)
        return node is not None and node.events.waits_for_snapshot

    # The life of a placed request

    def placed(self, request: PlacementRequest, placement: Placement, now_s: float) -> None:
        """Count a placement that is being carried out. Every one ends in `finished`."""
        nodes = self._nodes
        prefill, decode = nodes[placement.prefill_node], nodes[placement.decode_node]
        source = nodes.get(placement.source_node) if placement.source_node is not None else None
        output_tokens = self.expected_output_tokens(request.max_tokens)
        num_tokens, prefill_s = request.num_tokens, placement.prefill_s
        alone_s, (_, mean_s, longest_s) = prefill_s * placement.prompt_share, request.slo
        tbt_slo_s = mean_s if mean_s < longest_s else longest_s
        context_tokens, peak_tokens = num_tokens + int(output_tokens / 2), num_tokens + output_tokens
        decode_from_s = now_s + placement.predicted_ttft_s
        moved_tokens = num_tokens - placement.decode_matched_blocks * self.block_size
        handoff_s = self._cost.transfer_s(moved_tokens) if decode is not prefill else 0.0
        # by position: one is made for each request
        flight = self._in_flight[request.request_id] = InFlight(
            prefill,
            decode,
            source,
            prefill_s,
            num_tokens,
            context_tokens,
            peak_tokens,
            handoff_s,
            decode_from_s,
            tbt_slo_s,
            request.max_tokens > 0,
        )
        self.num_in_flight += 1
        shared_s = self._cost.profile.prefill_fixed_s * prefill.learned.prefill.ratio
        self.prefill_demand.add(max(0.0, alone_s - shared_s), now_s)
        self.mean_prefill_s += (PROMPT_GAIN if self.mean_prefill_s else 1.0) * (alone_s - self.mean_prefill_s)
        self._note_missed(request, placement.matched_blocks)
        self._join_queue(flight, now_s + placement.fetch_s)
        if source is not None:
            source.num_outgoing += 1
        if not flight.decodes:
            return
        decode.decode_sequences += 1
        if tbt_slo_s != inf:
            decode.bind_tbt(tbt_slo_s, 1)
        decode.decode_context_tokens += context_tokens
        decode.peak_tokens += peak_tokens
        decode.reported_free_tokens -= peak_tokens
        self._reorder(decode)
        self.projection.add(decode_from_s, context_tokens)

    def decode_node(self, request_id: RequestId) -> NodeState:
        """Return where a placed request is to decode, also if that node has left."""
        return self._in_flight[request_id].decode

    def prefill_done(self, request_id: RequestId, now_s: float) -> None:
        """The first token came: the prefill node is free of it, the decode node goes on."""
        flight = self._in_flight[request_id]
        flight.is_prefilled = True
        self._leave_prefill(flight, now_s)
        if not flight.decodes:
            return
        self.projection.move(flight.decode_from_s, now_s, flight.context_tokens)
        flight.decode_from_s = now_s
        self._runs(flight.decode, 1, flight.context_tokens, now_s, flight.tbt_slo_s)

    def finished(self, request_id: RequestId, now_s: float, output_tokens: int | None = None) -> None:
        """The request is over, however it ended; `output_tokens` where it ended well."""
        flight = self._in_flight.pop(request_id)
        self.num_in_flight -= 1
        decode, context_tokens, peak_tokens = flight.decode, flight.context_tokens, flight.peak_tokens
        if not flight.is_prefilled:
            self._leave_prefill(flight, now_s)
        elif flight.decodes:
            self._runs(decode, -1, -context_tokens, now_s, flight.tbt_slo_s)
        if not flight.decodes:
            return
        self.projection.discard(flight.decode_from_s, context_tokens)
        decode.decode_sequences -= 1
        if flight.tbt_slo_s != inf:
            decode.bind_tbt(flight.tbt_slo_s, -1)
        decode.decode_context_tokens -= context_tokens
        decode.give_back(peak_tokens)
        self._reorder(decode)
        if output_tokens is not None:
            self.projection.observe(now_s - flight.decode_from_s, output_tokens - 1)
            self.mean_output_tokens += OUTPUT_GAIN * (output_tokens - self.mean_output_tokens)

    def projected(self, moment_s: float, now_s: float) -> tuple[float, float]:
        """Return (sequences, context tokens) expected to decode at a moment, on all nodes.

        Of another conductor's requests it is known that they run, not since when: they stay."""
        sequences, tokens = self.projection.at(moment_s, now_s)
        return sequences + self.foreign_sequences, tokens + self.foreign_context_tokens

    def rejected(self, reason: RejectReason, has_room: bool = False) -> None:
        """A request was rejected and not let wait; `has_room`: the decode pool would have held it."""
        if reason is RejectReason.TBT and not has_room:
            self.room_price.found_no_room()

    def refused(self, node_id: NodeId, now_s: float) -> None:
        """A node had no blocks for a reservation: it is full until it says otherwise, a while from now."""
        if node := self._nodes.get(node_id):
            node.reported_free_tokens, node.full_until_s = NO_ROOM, now_s + FULL_S

    def expected_output_tokens(self, max_tokens: int) -> float:
        """Return how long an output is expected to be, by those seen so far."""
        mean = self.mean_output_tokens
        return mean if mean < max_tokens else float(max_tokens)

    def computing_s(self, chain: Sequence[Key], num_tokens: int) -> float:
        """Return the predicted seconds to compute a prompt after what some node holds of it."""
        groups = self.index.match(chain)
        prefix = min(groups[0][0] * self.block_size, num_tokens - 1) if groups else 0
        return self._cost.prefill_s(num_tokens - prefix, prefix)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a decode node's whole cache has room for so many tokens and one more."""
        return any(self.members[slot].capacity_tokens > num_tokens for slot in bits_of(self.decode_mask))

    def settle(self, now_s: float) -> None:
        """Bring what changes by itself up to a moment, before anything is chosen."""
        for slot in self.prefill_order.settle(now_s):
            node = self.members[slot]
            if node.num_queued and (overdue_s := node.overdue_s):
                self.prefill_order.set(slot, now_s + overdue_s + node.foreign_queue_s)
        if not self.projection.is_timed:
            self._predict_token_s()
        decode_s = self.projection.decode_s if self.room_price.price > 1.0 else inf  # a mean of many times
        self.room_price.settle(now_s, decode_s if self.num_in_flight or self.running_sequences else 0.0)
        if self.corrections.changed:
            self._settle_paces()

    def _predict_token_s(self) -> None:
        """Have tokens take as long as with all who were placed, until it is known."""
        counted, nodes = self.projection, max(1, (self.decode_mask | self.lent_mask).bit_count())
        counted.predict(self._cost.decode_step_s(counted.num_sequences / nodes, counted.num_tokens / nodes))

    def _settle_paces(self) -> None:
        for node_id in self.corrections.changed:
            if node := self._nodes.get(NodeId(node_id)):
                learned = node.learned.prefill
                self.paces.set(node.slot, learned.ratio, learned.measured_ratio)
                self._reorder(node)
        self.corrections.changed.clear()

    def _note_missed(self, request: PlacementRequest, depth: int) -> None:
        """Learn what it costs that blocks of this prompt were evicted, if any were not long ago."""
        price, chain = self.copy_price, request.chain
        missed = price.num_missed(chain, depth)
        if missed:
            last = request.num_tokens - 1
            prefix, end = min(depth * self.block_size, last), min((depth + missed) * self.block_size, last)
            prefill_s, tokens = self._cost.prefill_s, request.num_tokens
            seconds = prefill_s(tokens - prefix, prefix) - prefill_s(tokens - end, end)
            price.recomputed(chain, depth, missed, max(0.0, seconds))

    def _join_queue(self, flight: InFlight, start_s: float) -> None:
        """Count a prefill, which begins at `start_s` or after those before it, and its hand-off."""
        node, decode = flight.prefill, flight.decode
        prefills = self.prefill_mask >> node.slot & 1
        if prefills:
            start_s = max(start_s, self.prefill_order.values[node.slot])
        self.num_queued += 1
        node.num_queued += 1
        node.num_prompts += 1
        node.queued_s += flight.prefill_s
        node.queued_tokens += flight.prompt_tokens
        node.sending_s += flight.handoff_s
        node.sends_until_s = max(node.sends_until_s, start_s) + flight.handoff_s
        decode.receiving_s += flight.handoff_s
        if prefills:
            self.prefill_order.set(node.slot, max(start_s + flight.prefill_s, node.sends_until_s))
        else:
            self._reorder(node)

    def _foreign_queue_s(self, node: NodeState, beat: Heartbeat) -> float:
        """Return the seconds of prefill that a node has to do for other conductors, by its heartbeat."""
        tokens = beat.num_queued_tokens - node.queued_tokens
        if tokens <= 0:
            return 0.0
        # a heartbeat has their number and not their lengths: attention takes the square of each
        prompts = max(1, beat.num_waiting + beat.num_running - node.num_queued)
        return prompts * self._cost.prefill_s(max(1, tokens // prompts), 0)

    def _note_foreign(self, node: NodeState, beat: Heartbeat | None, now_s: float) -> None:
        """Count what decodes on a node for other conductors, by its heartbeat; None: it has left."""
        sequences = context_tokens = 0
        if beat is not None:
            own = node.running_sequences - node.foreign_sequences
            own_tokens = node.running_context_tokens - node.foreign_context_tokens
            # some of our prompts that are to decode there may have a token of which we have not heard
            prompts = max(0, beat.num_waiting + beat.num_running - beat.num_step_rows)
            unheard = min(max(0, node.num_queued - prompts), node.decode_sequences - node.running_sequences)
            sequences = max(0, beat.num_step_rows - own - unheard)
            # contexts are estimated: where every sequence is ours, so is every token
            context_tokens = max(0, beat.num_context_tokens - int(own_tokens)) if sequences else 0
        more, more_tokens = sequences - node.foreign_sequences, context_tokens - node.foreign_context_tokens
        if not more and not more_tokens:
            return
        for owner in (node, self):
            owner.foreign_sequences += more
            owner.foreign_context_tokens += more_tokens
        self._runs(node, more, more_tokens, now_s)
        node.decode_sequences += more
        node.decode_context_tokens += more_tokens

    def _runs(self, node: NodeState, more: int, tokens: float, now_s: float, bound_s: float = inf) -> None:
        node.count_running(more, tokens, bound_s)
        self.running_sequences += more
        self.running_context_tokens += tokens
        step_s = self._cost.placed_step_s(node.running_sequences, node.running_context_tokens, node.places)
        node.running_step_s = step_s
        if self.on_running is not None:
            self.on_running(node, now_s)

    def _leave_prefill(self, flight: InFlight, now_s: float) -> None:
        node = flight.prefill
        self.num_queued -= 1
        node.num_queued -= 1
        # an empty queue is exactly empty: sums of floats drift
        node.queued_s = node.queued_s - flight.prefill_s if node.num_queued else 0.0
        node.sending_s = max(0.0, node.sending_s - flight.handoff_s) if node.num_queued else 0.0
        node.sends_until_s = now_s + node.sending_s
        decode = flight.decode
        decode.receiving_s = max(0.0, decode.receiving_s - flight.handoff_s)
        node.queued_tokens -= flight.prompt_tokens
        if flight.source is not None:
            flight.source.num_outgoing -= 1
        self._requeue(node, now_s)

    def _requeue(self, node: NodeState, now_s: float) -> None:
        if self.prefill_mask >> node.slot & 1 and node.is_member:
            ends_s = now_s + max(node.queued_s, node.sending_s) + node.foreign_queue_s
            self.prefill_order.set(node.slot, ends_s)
        else:
            self._reorder(node)

    def _reorder(self, node: NodeState) -> None:
        if (self.prefill_mask | self.lent_mask) >> node.slot & 1:
            self.note_lent(node)
        if self.decode_mask >> node.slot & 1 and node.is_member:
            step_s = self._step_s(node)
            computes = node.num_queued and not self.prefill_mask >> node.slot & 1
            self.decode_order.set(node.slot, step_s * COMPUTES_TOO if computes else step_s)

    def _step_s(self, node: NodeState) -> float:
        """Return the predicted seconds of a token without prompts, with all who are to decode on a node."""
        sequences = node.decode_sequences + (node.decode_sequences >= node.places)  # the next would wait
        step_s = self._cost.gap_s(sequences, node.decode_context_tokens, node.places)
        return step_s * node.learned.decode.ratio

    def note_lent(self, node: NodeState) -> None:
        """Let `lent_mask` say whether `node` is a prefill node that decodes."""
        bit = 1 << node.slot
        lends = node.decode_sequences and self.prefill_mask & ~self.decode_mask & bit
        if self.members.get(node.slot) is node:  # requests of a dead one end when another has its slot
            self.lent_mask = self.lent_mask | bit if lends else self.lent_mask & ~bit

    def _refresh_roles(self, node: NodeState, now_s: float) -> None:
        """Let the masks and orders hold `node` where it may be chosen, and nowhere else."""
        bit = 1 << node.slot
        serves = node.is_member and not node.is_draining
        roles = node.info.roles if serves else frozenset[Role]()
        self.prefill_mask = self.prefill_mask | bit if Role.PREFILL in roles else self.prefill_mask & ~bit
        self.decode_mask = self.decode_mask | bit if Role.DECODE in roles else self.decode_mask & ~bit
        self.num_prefill = max(1, self.prefill_mask.bit_count())
        places = [self.members[slot].places for slot in bits_of(self.decode_mask)]
        self.decode_places = sum(places) / len(places) if places else inf
        self.prefill_order.remove(node.slot)
        self.decode_order.remove(node.slot)
        self._requeue(node, now_s)
        self._reorder(node)
