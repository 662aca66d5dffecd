"""Links: flows between simulated nodes, sharing bandwidth max-min fairly.

Every node has one link with a rate out and a rate in. A flow may have a limit of its own:
a hand-off cannot leave faster than its layers are computed. Rates are max-min fair: no
flow can gain without one that is no faster losing.

Flows from one link to another are a lane. Those of a lane that have less than their limits have the same
rate, whatever they began with, so the lane counts the bytes that each of them got, and a flow ends where
that count says: a change of rate is one number for all of them, and the first to end is the top of a heap.
Those that have their limits end when they end. So a flow that comes or goes costs as many steps as the links
and lanes that depend on it, and not the flows: hundreds wait where links are full.

Two cases need no computation, and are nearly all where links are not full: a flow that finds its limit left
at both ends changes nobody's rate; and one that leaves ends where all have what they want frees nobody.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any

from conductor.replay.events import Schedule

Done = Callable[..., None]

# Of a link's rate: below this share left, it counts as full (sums of rates drift).
FULL = 1e-9


@dataclass(slots=True, eq=False)
class SimLink:
    """One direction of one node's link: its rate, and who uses it."""

    capacity: float
    lanes: dict[SimLink, FlowLane] = field(default_factory=dict)
    """The lanes with a flow, by their other end."""
    left: float = field(init=False)
    num_flows: int = 0
    num_slowed: int = 0
    """Flows that have less than their limits."""
    num_open: int = 0
    """While rates are computed: flows without one, which share `left`."""

    def __post_init__(self) -> None:
        self.left = self.capacity


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way from one link to another."""

    sender: SimLink
    receiver: SimLink
    remaining: float
    """The bytes to come at `moved_at_s`; of a flow that is slowed its lane knows."""
    limit: float
    done: Done
    """Called with the moment and `arguments` when the last byte arrived."""
    arguments: tuple[Any, ...] = ()
    moved_at_s: float = 0.0
    lane: FlowLane | None = None
    """Lane that carries the flow; None: it has not begun, or has ended."""
    ends_at_count: float = inf
    """The bytes that its lane has counted when its last one arrives; infinity: it has its limit."""
    version: int = 0

    @property
    def rate(self) -> float:
        """Bytes a second, while it runs."""
        assert self.lane is not None
        return self.limit if self.ends_at_count == inf else self.lane.rate


class FlowLane:
    """Flows from one link to another, by their limits: the first `num_free` have them, the others `rate`."""

    __slots__ = (
        "_num_queued",
        "_queue",
        "counted",
        "counted_at_s",
        "ends_at_s",
        "first_ends_at",
        "flows",
        "is_open",
        "limits",
        "num_free",
        "num_settled",
        "rate",
        "receiver",
        "sender",
        "share",
    )

    def __init__(self, sender: SimLink, receiver: SimLink) -> None:
        self.sender = sender
        self.receiver = receiver
        self.flows: list[Flow] = []
        self.limits: list[float] = []
        self.num_free = 0
        self.rate = 0.0
        self.ends_at_s = inf
        """When the first of those with `rate` ends; infinity: there are none."""
        self.num_settled = 0
        """While rates are computed: flows that have theirs."""
        self.share = 0.0
        """While rates are computed: what the others get."""
        self.is_open = False
        """While rates are computed: whether some have none yet."""
        self.counted = 0.0
        """The bytes that each flow with `rate` got by `counted_at_s`, since the lane began."""
        self.counted_at_s = 0.0
        self.first_ends_at = inf
        """The count that the first of them ends at; infinity: it is not known."""
        self._queue: list[tuple[float, int, Flow]] = []
        self._num_queued = 0

    @property
    def num_slowed(self) -> int:
        """Flows that have less than their limits."""
        return len(self.flows) - self.num_free

    def insert(self, flow: Flow) -> bool:
        """Take in a flow; return whether it is among those that have their limits."""
        at = bisect_right(self.limits, flow.limit)
        self.limits.insert(at, flow.limit)
        self.flows.insert(at, flow)
        is_free = at < self.num_free
        self.num_free += is_free
        return is_free

    def remove(self, flow: Flow) -> None:
        at = self.flows.index(flow)
        del self.flows[at], self.limits[at]
        self.num_free -= flow.ends_at_count == inf
        flow.lane = None

    def slow(self, flow: Flow) -> None:
        """Let a flow, of which `remaining` is to come now, have the rate of the lane."""
        flow.version += 1
        flow.ends_at_count = self.counted + flow.remaining
        self.first_ends_at = inf
        self._num_queued += 1
        heappush(self._queue, (flow.ends_at_count, self._num_queued, flow))

    def count(self, now_s: float) -> None:
        """Count the bytes that each flow with the lane's rate has got."""
        self.counted += self.rate * (now_s - self.counted_at_s)
        self.counted_at_s = now_s

    def left_of(self, flow: Flow) -> float:
        """Return the bytes to come of a flow that had the lane's rate, as counted last."""
        return max(0.0, flow.ends_at_count - self.counted)

    def set_rate(self, rate: float) -> None:
        """Let the flows that are slowed have a rate from the moment counted last."""
        self.rate = rate
        queue = self._queue
        while queue and (queue[0][2].lane is not self or queue[0][2].ends_at_count != queue[0][0]):
            heappop(queue)
        self.first_ends_at = self.ends_at_s = inf
        if queue:
            self.first_ends_at = first = queue[0][0]
            self.ends_at_s = (
                self.counted_at_s + (first - self.counted if first > self.counted else 0.0) / rate
            )

    def ended(self, now_s: float) -> Flow:
        """Return the flow that ends at `ends_at_s`, which is now."""
        self.counted, self.counted_at_s = self.first_ends_at, now_s
        return self._queue[0][2]


class Links:
    """All flows of the cluster."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._slow: dict[FlowLane, None] = {}
        """Lanes with a flow that has less than its limit."""
        self._next_s = inf
        self._version = 0
        self.bytes_moved = 0.0

    def start(self, flow: Flow, now_s: float) -> None:
        """Let `flow` run until its last byte arrived."""
        flow.moved_at_s = now_s
        sender, receiver = flow.sender, flow.receiver
        # alone on its links, a flow has all it wants
        flow.limit = limit = min(flow.limit, sender.capacity, receiver.capacity)
        self.bytes_moved += flow.remaining
        lane = sender.lanes.get(receiver)
        if lane is None:
            lane = sender.lanes[receiver] = receiver.lanes[sender] = FlowLane(sender, receiver)
        flow.lane = lane
        is_free = lane.insert(flow)
        sender.num_flows += 1
        receiver.num_flows += 1
        if limit <= sender.left and limit <= receiver.left and lane not in self._slow:
            sender.left -= limit
            receiver.left -= limit
            lane.num_free += not is_free
            self._run_free(flow, now_s)
            return
        # until its share is known
        if is_free:
            self._run_free(flow, now_s)
        else:
            lane.count(now_s)
            lane.slow(flow)
            sender.num_slowed += 1
            receiver.num_slowed += 1
        self._share((sender, receiver), now_s)

    def cancel(self, flow: Flow, now_s: float) -> None:
        """End a flow before its last byte; one that has ended is passed over."""
        lane = flow.lane
        if lane is None:
            return
        if flow.ends_at_count < inf:
            lane.count(now_s)
            self.bytes_moved -= lane.left_of(flow)
        else:
            self.bytes_moved -= max(0.0, flow.remaining - flow.limit * (now_s - flow.moved_at_s))
        self._leave(flow, lane)
        self._left((flow.sender, flow.receiver), now_s)

    def _leave(self, flow: Flow, lane: FlowLane) -> None:
        """Take a flow out; who shares its links gets nothing yet."""
        flow.version += 1
        rate, is_slowed = flow.rate, flow.ends_at_count < inf
        lane.remove(flow)
        for link, other in ((flow.sender, flow.receiver), (flow.receiver, flow.sender)):
            link.num_flows -= 1
            link.num_slowed -= is_slowed
            # an empty link is exactly empty: sums of rates drift
            link.left = link.left + rate if link.num_flows else link.capacity
            if not lane.flows:
                del link.lanes[other]
        if is_slowed:
            if lane.num_slowed:
                lane.set_rate(lane.rate)
            else:
                self._slow.pop(lane)
                lane.ends_at_s = lane.first_ends_at = inf

    def _run_free(self, flow: Flow, now_s: float) -> None:
        """Let a flow have its limit until its end."""
        flow.version += 1
        flow.ends_at_count = inf
        flow.moved_at_s = now_s
        ends_at_s = now_s + flow.remaining / flow.limit
        self._schedule(ends_at_s, self._finished, flow, flow.version, ends_at_s)

    def _finished(self, flow: Flow, version: int, now_s: float) -> None:
        if version == flow.version and flow.lane is not None:
            self._leave(flow, flow.lane)
            self._left((flow.sender, flow.receiver), now_s)
            flow.done(now_s, *flow.arguments)

    def _first_ended(self, version: int, now_s: float) -> None:
        """End the slowed flows that are due."""
        if version != self._version:
            return
        ended = [lane.ended(now_s) for lane in self._slow if lane.ends_at_s <= now_s]
        self._next_s = inf
        for flow in ended:
            assert flow.lane is not None
            self._leave(flow, flow.lane)
        self._left([link for flow in ended for link in (flow.sender, flow.receiver)], now_s)
        for flow in ended:
            flow.done(now_s, *flow.arguments)

    def _left(self, changed: Iterable[SimLink], now_s: float) -> None:
        """Give what is free again to those who want more than they have."""
        if wanting := [link for link in changed if link.num_slowed]:
            self._share(wanting, now_s)
        elif self._next_s < inf or self._slow:
            self._schedule_first()

    def _share(self, changed: Iterable[SimLink], now_s: float) -> None:
        """Give every flow that depends on the links its fair rate."""
        links, lanes = _connected(changed)
        _fill(links)
        for lane in lanes:
            if lane.num_free != lane.num_settled or lane.first_ends_at == inf:
                self._take_share(lane, now_s)
            elif (share := lane.share) != lane.rate:
                # as `_take_share` has it: nearly all of them, each time
                lane.counted = counted = lane.counted + lane.rate * (now_s - lane.counted_at_s)
                lane.counted_at_s, lane.rate, left = now_s, share, lane.first_ends_at - counted
                lane.ends_at_s = now_s + (left if left > 0.0 else 0.0) / share
        self._schedule_first()

    def _take_share(self, lane: FlowLane, now_s: float) -> None:
        """Let a lane's flows have the rates that were computed, some their limits and others not any more."""
        before, after, flows = lane.num_free, lane.num_settled, lane.flows
        lane.count(now_s)
        for flow in flows[before:after]:
            flow.remaining = lane.left_of(flow)
            self._run_free(flow, now_s)
        for flow in flows[after:before]:
            flow.remaining = max(0.0, flow.remaining - flow.limit * (now_s - flow.moved_at_s))
            lane.slow(flow)
        lane.num_free = after
        lane.sender.num_slowed += before - after
        lane.receiver.num_slowed += before - after
        if after < len(flows):
            self._slow[lane] = None
            lane.set_rate(lane.share)
        else:
            self._slow.pop(lane, None)
            lane.ends_at_s = lane.first_ends_at = inf

    def _schedule_first(self) -> None:
        """Have `_first_ended` called when the first slowed flow ends."""
        next_s = min([lane.ends_at_s for lane in self._slow], default=inf)
        if next_s != self._next_s:
            self._next_s = next_s
            self._version += 1
            if next_s < inf:
                self._schedule(next_s, self._first_ended, self._version, next_s)


def _is_modest(lane: FlowLane) -> bool:
    """Return whether an equal share at both ends is enough for each flow: then all get their limits."""
    most, sender, receiver = lane.limits[-1], lane.sender, lane.receiver
    return most * sender.num_flows <= sender.capacity and most * receiver.num_flows <= receiver.capacity


def _connected(first: Iterable[SimLink]) -> tuple[list[SimLink], list[FlowLane]]:
    """Return the links whose shares depend on each other, and their lanes; nobody has a rate there.

    Dependence goes from link to link over lanes, but not where all flows have their limits whatever others
    do: what those take is not `left`.
    """
    lanes: dict[FlowLane, None] = {}
    links: dict[SimLink, None] = dict.fromkeys(first)
    waiting = list(links)
    for link in waiting:
        link.left, link.num_open = link.capacity, link.num_flows
    while waiting:
        link = waiting.pop()
        for other, lane in link.lanes.items():
            if lane in lanes:
                continue
            if not lane.num_slowed and _is_modest(lane):
                link.left -= sum(lane.limits)
                link.num_open -= len(lane.limits)
                continue
            lanes[lane] = None
            lane.num_settled, lane.is_open = 0, True
            if other not in links:
                links[other] = None
                other.left, other.num_open = other.capacity, other.num_flows
                waiting.append(other)
    return list(links), list(lanes)


def _fill(links: list[SimLink]) -> None:
    """Set the max-min fair `share` of each open lane, and how many of its flows have their limits before.

    The link that has least for each of its flows is full first. Flows on it that want no more have their
    limits, which leaves the others more; if there are none, all have what it has. The least only rises, so an
    old entry of the heap says too little, never too much.
    """
    heap = [(_fair(link), number, link) for number, link in enumerate(links) if link.num_open]
    heapify(heap)
    while heap:
        known, number, link = heap[0]
        if not link.num_open:
            heappop(heap)
            continue
        share = _fair(link)
        if share > known:
            heapreplace(heap, (share, number, link))
            continue
        is_full = True
        for lane in link.lanes.values():
            if lane.is_open and lane.limits[lane.num_settled] <= share:
                is_full = False
                _stop_at_limits(lane, share)
        if is_full:
            heappop(heap)
            _divide(link, share)
    for link in links:
        if link.left < 0.0:
            link.left = 0.0


def _fair(link: SimLink) -> float:
    """Return what a link has for each flow that has no rate yet."""
    left, least = link.left, FULL * link.capacity
    return (left if left > least else least) / link.num_open


def _divide(link: SimLink, share: float) -> None:
    """Give all flows of a link that have no rate yet an equal one."""
    for other, lane in link.lanes.items():
        if lane.is_open:
            lane.is_open = False
            lane.share = share
            count = len(lane.limits) - lane.num_settled
            other.left -= share * count
            other.num_open -= count
    link.left, link.num_open = 0.0, 0


def _stop_at_limits(lane: FlowLane, share: float) -> None:
    """Give the flows of a lane that want no more than a share, of those without a rate, their limits."""
    limits, first = lane.limits, lane.num_settled
    lane.num_settled = end = bisect_right(limits, share, first)
    lane.is_open = end < len(limits)
    total = sum(limits[first:end])
    for link in (lane.sender, lane.receiver):
        link.left -= total
        link.num_open -= end - first
