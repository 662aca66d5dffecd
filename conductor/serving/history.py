"""The last hour and day of a conductor and its nodes, in memory, for the page at /ui and `conductor top`.

    each second        one row of the cluster: what ended, percentiles, tokens, queues, KV
    each 30 s          one row of the same for the day
    each 10 s, 300 s   one row of each node, for the hour and the day, which of them was fullest, and what the
                       requests lacked that were rejected meanwhile

A ring of fixed size for each, so that memory is bounded whatever comes: under 8 MB at 1,000 nodes, which a
test counts. Counts are differences of the metrics' totals, so nothing is counted twice; percentiles are of
every request's own TTFT and mean TBT, where metrics have buckets alone. A row's number is its moment since
1970 over the step, so that rows of a conductor that was started again follow those of the one before.

Nothing is kept for longer, or over a restart: a Prometheus does that (`server.prometheus`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil, exp, nan
from typing import Any

from base.clock import Clock
from base.messages import Prefilled
from base.metrics import ConductorMetrics
from base.request import NodeId, RequestId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.decisions import Actual, Decision
from conductor.placing.placement import Placement, PlacementRequest
from conductor.serving.budgets import Budgets
from conductor.serving.dispatch import Dispatcher, RequestObserver
from conductor.serving.fullest import Fullest
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from conductor.serving.ring import Ring
from conductor.serving.status import held_share

CLUSTER_SERIES = (
    *("good", "late", "rejected", "failed", "cancelled", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("ttft_p50", "ttft_p90", "ttft_p99", "tbt_p50", "tbt_p90", "tbt_p99"),
    *("running", "waiting", "waiting_on_nodes", "kv_held", "kv_moved_bytes"),
)
"""Sequences and tokens a second; seconds; counts; a share; bytes a second. NaN: nothing to say."""
NODE_SERIES = ("queue_s", "step_s", "kv_held", "running")
"""Predicted seconds before a prompt that came, in the mean of the row, and of the next decode step; a share;
sequences.

Before a prompt are those in the node's queue, and the node's part of those that wait to be placed: the
conductor keeps them back while nodes have enough, so that a node's own queue is never long.
"""

HOUR_S, DAY_S = 3_600, 86_400
CLUSTER_STEPS_S = 1, 30
NODE_STEPS_S = 10, 300
ROWS_OF_A_DAYS_ROW = NODE_STEPS_S[1] // NODE_STEPS_S[0]
MAX_NODES = 1_000
"""Nodes with a history; those that come when it is full take the places of those that left."""

QUANTILES = (0.5, 0.9, 0.99)
MAX_SAMPLES = 2_048
"""Values behind a percentile: where more come, every second one is dropped, then every fourth, and so on."""

RATE_S = 10.0
"""The time over which rates of links and prefixes fade to a third."""
MAX_RATES = 1_024


class Samples:
    """Values that percentiles are taken of, thinned where there are too many."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._stride = 1
        self._passed = 0

    def add(self, value: float) -> None:
        self._passed += 1
        if self._passed >= self._stride:
            self._passed = 0
            self._kept.append(value)
            if len(self._kept) > MAX_SAMPLES:
                del self._kept[::2]
                self._stride *= 2

    def take(self) -> list[float]:
        """Return the percentiles of what came, NaN of nothing, and begin again."""
        ordered = sorted(self._kept)
        self._kept, self._stride, self._passed = [], 1, 0
        if not ordered:
            return [nan] * len(QUANTILES)
        return [ordered[ceil(share * len(ordered)) - 1] for share in QUANTILES]


class Rates:
    """Amounts a second by key, each fading. The key longest without any goes where there are too many."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[float, float]] = {}

    def add(self, key: object, amount: float, now_s: float) -> None:
        rate, at_s = self._kept.pop(key, (0.0, now_s))
        self._kept[key] = rate * exp((at_s - now_s) / RATE_S) + amount / RATE_S, now_s
        if len(self._kept) > MAX_RATES:
            del self._kept[next(iter(self._kept))]

    def highest(self, count: int, now_s: float) -> list[tuple[Any, float]]:
        """Return the keys of the highest rates, the highest first."""
        faded = [(key, rate * exp((at_s - now_s) / RATE_S)) for key, (rate, at_s) in self._kept.items()]
        return sorted(faded, key=lambda pair: -pair[1])[:count]


class NodeTrack:
    """The hour and the day of one node."""

    def __init__(self) -> None:
        self.hour = Ring(NODE_SERIES, NODE_STEPS_S[0], HOUR_S, is_half=True)
        self.day = Ring(NODE_SERIES, NODE_STEPS_S[1], DAY_S, is_half=True)

    def put(self, row: int, values: Sequence[float]) -> None:
        self.hour.put(row, values)
        if ends_a_row_of_the_day(row):
            self.day.put(row // ROWS_OF_A_DAYS_ROW, self.hour.mean(ROWS_OF_A_DAYS_ROW))


def ends_a_row_of_the_day(row: int) -> bool:
    """Return whether a node's row of the hour is the last of those that make one of the day."""
    return row % ROWS_OF_A_DAYS_ROW == ROWS_OF_A_DAYS_ROW - 1


class History(RequestObserver):
    """Keeps the rings. Belongs to the event loop."""

    def __init__(
        self,
        metrics: ConductorMetrics,
        membership: Membership,
        view: ClusterView,
        cost: CostModel,
        clock: Clock,
        wall_s: Callable[[], float],
        budgets: Budgets,
    ) -> None:
        """Begin.

        Args:
            wall_s: Seconds since 1970, asked for once: rows follow `clock`.
            budgets: What nodes may use up; they learn here how long prompts take.
        """
        self.hour = Ring(CLUSTER_SERIES, CLUSTER_STEPS_S[0], HOUR_S)
        self.day = Ring(CLUSTER_SERIES, CLUSTER_STEPS_S[1], DAY_S)
        self.nodes: dict[NodeId, NodeTrack] = {}
        self.fullest = tuple(
            Fullest(step_s, span_s) for step_s, span_s in zip(NODE_STEPS_S, (HOUR_S, DAY_S), strict=True)
        )
        """The fullest node of each row, of the hour and of the day."""
        self.budgets = budgets
        self.links = Rates()
        """Bytes of KV a second, by the node that they come from and the one that they go to."""
        self.prefixes = Rates()
        """Requests a second, by the last block of the prefix that was matched and its number of blocks."""
        self._metrics, self._membership, self._view, self._clock = metrics, membership, view, clock
        self._token_bytes = cost.profile.kv_token_bytes
        self._since_1970_s = wall_s() - clock.now_s()
        self._totals = metrics.totals()
        self._percentiles = [Samples(), Samples()], [Samples(), Samples()]
        self._moved_bytes = 0.0
        self._queues: dict[NodeId, tuple[float, int]] = {}
        """The sum of the seconds of each node's queue since its last row, and how many they are."""
        self._sampled_at_s = clock.now_s()
        self._next_day_row = int(self.now_s + 1) // CLUSTER_STEPS_S[1]
        self._next_node_row = int(self.now_s) // NODE_STEPS_S[0] + 1
        """The rows that are due next: a second later where the process had no time for a second."""

    @property
    def now_s(self) -> float:
        """Seconds since 1970, as rows are numbered by."""
        return self._clock.now_s() + self._since_1970_s

    # What the dispatcher notifies of

    def decided(self, made: Decision) -> None:
        lacked = self.budgets.lacked(made, self._view)
        for each in self.fullest:
            each.decided(lacked)

    def first_token(
        self, ttft_s: float | None, prefilled: Prefilled, asked: PlacementRequest, placement: Placement
    ) -> None:
        self.budgets.computed(prefilled.times.compute_s)
        if ttft_s is not None and asked.max_tokens:
            for samples, _ in self._percentiles:
                samples.add(ttft_s)
        now_s, size = self._clock.now_s(), self._view.block_size
        if placement.prefill_node != placement.decode_node:
            moved = asked.num_tokens - placement.decode_matched_blocks * size
            self._moved(placement.prefill_node, placement.decode_node, moved, now_s)
        if placement.source_node is not None:
            fetched = (placement.matched_blocks - placement.local_blocks) * size
            self._moved(placement.source_node, placement.prefill_node, fetched, now_s)
        if depth := placement.matched_blocks:
            self.prefixes.add((asked.chain[depth - 1], depth), 1.0, now_s)

    def ended(self, attempt_id: RequestId, actual: Actual) -> None:
        if actual.mean_tbt_s is not None:
            for _, samples in self._percentiles:
                samples.add(actual.mean_tbt_s)

    def _moved(self, source: NodeId, target: NodeId, tokens: int, now_s: float) -> None:
        num_bytes = max(0, tokens) * self._token_bytes
        self.links.add((source, target), num_bytes, now_s)
        self._moved_bytes += num_bytes

    # What is asked of others, once a second

    async def keep(self, dispatcher: Dispatcher) -> None:
        """Take a row each second, until cancelled."""
        while True:
            self.take(len(dispatcher.queue), dispatcher.queue.line_s)
            await asyncio.sleep(1.0 - self.now_s % 1.0)

    def take(self, num_waiting: int, line_s: float = 0.0) -> None:
        """Take the rows that are due now.

        Args:
            num_waiting: Requests that wait to be placed.
            line_s: Seconds of their prefill for each node, as `PlacementQueue.line_s`.
        """
        now_s = self._clock.now_s()
        row = int(self.now_s)
        if row >= self.hour.next_row:
            elapsed_s = max(1e-3, now_s - self._sampled_at_s)
            self._sampled_at_s = now_s
            self.hour.put(row, self._cluster_row(elapsed_s, num_waiting))
            every = CLUSTER_STEPS_S[1]
            if (ended := (row + 1) // every) > self._next_day_row:
                self._next_day_row = ended
                means = dict(zip(CLUSTER_SERIES, self.hour.mean(every), strict=True))
                self.day.put(ended - 1, [*(means | self._quantiles(1)).values()])
            self._sample_queues(now_s, line_s)
            if (begun := row // NODE_STEPS_S[0]) >= self._next_node_row:
                self._next_node_row = begun + 1
                self._take_nodes(begun, now_s)

    def _cluster_row(self, elapsed_s: float, num_waiting: int) -> list[float]:
        before, self._totals = self._totals, self._metrics.totals()
        rates = [(now - then) / elapsed_s for now, then in zip(self._totals, before, strict=True)]
        beats = self._membership.heartbeats
        moved, self._moved_bytes = self._moved_bytes, 0.0
        return [
            *rates,
            *self._quantiles(0).values(),
            self._view.num_in_flight,
            num_waiting,
            sum(beat.num_waiting for beat in beats),
            held_share(beats),
            moved / elapsed_s,
        ]

    def _quantiles(self, which: int) -> dict[str, float]:
        ttft, tbt = self._percentiles[which]
        return dict(zip(CLUSTER_SERIES[8:14], [*ttft.take(), *tbt.take()], strict=True))

    def _sample_queues(self, now_s: float, line_s: float) -> None:
        """Add up each node's queue: it rises and falls with each prompt, so that one moment says little."""
        before = self._queues
        self._queues = {}
        for session in self._membership.sessions:
            node_id = session.info.node_id
            queue_s, _ = self._view.load_of(node_id, now_s)  # NaN, and stays so: it does not prefill
            sum_s, many = before.get(node_id, (0.0, 0))
            self._queues[node_id] = sum_s + queue_s + line_s, many + 1

    def _take_nodes(self, row: int, now_s: float) -> None:
        taken = {}
        for session in self._membership.sessions:
            node_id = session.info.node_id
            track = self.nodes.get(node_id) or self._track(node_id)
            if track is not None:
                taken[node_id] = self._node_row(session, now_s)
                track.put(row, taken[node_id])
        self._queues.clear()
        (hour, day), limits = self.fullest, self.budgets.limits
        hour.put(row, taken, limits)
        if ends_a_row_of_the_day(row):
            number = row // ROWS_OF_A_DAYS_ROW
            day.put(number, {node_id: self.nodes[node_id].day.row(number) for node_id in taken}, limits)

    def _track(self, node_id: NodeId) -> NodeTrack | None:
        """Return a track for a node that has none; None where all belong to nodes that are attached."""
        if len(self.nodes) >= MAX_NODES:
            gone = next((each for each in self.nodes if not self._view.is_member(each)), None)
            if gone is None:
                return None
            del self.nodes[gone]
        self.nodes[node_id] = NodeTrack()
        return self.nodes[node_id]

    def _node_row(self, session: NodeSession, now_s: float) -> tuple[float, ...]:
        beat = session.last_heartbeat
        sum_s, many = self._queues[session.info.node_id]
        queue_s, step_s = sum_s / many, self._view.load_of(session.info.node_id, now_s)[1]
        if beat is None:
            return queue_s, step_s, nan, nan
        return queue_s, step_s, held_share([beat]), beat.num_running
