"""Flows share links max-min fairly, use them fully, and lose no byte."""

import random
from heapq import heappop, heappush
from math import inf

import pytest

from conductor.replay.links import Flow, Links, SimLink


class Events:
    """A heap of calls by moment: the simulator's, without the simulator."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap = []
        self._count = 0

    def at(self, moment_s, call, *arguments) -> None:
        assert moment_s >= self.now_s - 1e-9, "the clock went back"
        self._count += 1
        heappush(self._heap, (moment_s, self._count, call, arguments))

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else inf

    def step(self) -> bool:
        if not self._heap:
            return False
        self.now_s, _, call, arguments = heappop(self._heap)
        call(*arguments)
        return True


def flows_of(link: SimLink) -> list[Flow]:
    return [flow for lane in link.lanes.values() for flow in lane.flows]


def check_max_min(flows: list[Flow]) -> None:
    """Each flow has its limit, or a full link on which nobody is faster."""
    for flow in flows:
        if flow.rate >= flow.limit * (1 - 1e-9):
            continue
        bottlenecks = [
            link
            for link in (flow.sender, flow.receiver)
            if sum(other.rate for other in flows_of(link)) >= link.capacity * (1 - 1e-6)
            and all(other.rate <= flow.rate * (1 + 1e-6) for other in flows_of(link))
        ]
        assert bottlenecks, "a flow could be faster without harm to a slower one"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_flows", [30, 60])
def test_random_flows_are_max_min_fair_at_every_moment_and_end_with_their_last_byte(
    seed: int, num_flows: int
) -> None:
    rng = random.Random(seed)
    events = Events()
    links = Links(events.at)
    sends = [SimLink(rng.choice([1.0, 2.0, 10.0])) for _ in range(4)]
    receives = [SimLink(rng.choice([1.0, 3.0, 10.0])) for _ in range(4)]
    alive: list[Flow] = []
    sizes: dict[Flow, float] = {}
    moved: dict[Flow, float] = {}
    arrived = []

    def start(number: int) -> None:
        limit = rng.choice([inf, 0.2, 1.0])
        flow = Flow(rng.choice(sends), rng.choice(receives), rng.random() * 20, limit, lambda now_s: None)
        sizes[flow], moved[flow] = flow.remaining, 0.0

        def done(now_s: float) -> None:
            alive.remove(flow)
            arrived.append(number)
            assert moved[flow] == pytest.approx(sizes[flow], rel=1e-6, abs=1e-6)

        flow.done = done
        alive.append(flow)
        links.start(flow, events.now_s)

    for number in range(num_flows):
        events.at(rng.random() * 20, start, number)
    while (next_s := events.next_s) < inf:
        for flow in alive:
            moved[flow] += flow.rate * (next_s - events.now_s)
        events.step()
        check_max_min(alive)
        for link in (*sends, *receives):
            used = sum(flow.rate for flow in flows_of(link))
            assert used <= link.capacity * (1 + 1e-6)
            assert link.left == pytest.approx(link.capacity - used, abs=1e-6)
    assert sorted(arrived) == list(range(num_flows))


def test_two_flows_from_one_sender_take_twice_as_long() -> None:
    events, done = Events(), []
    links = Links(events.at)
    sender = SimLink(10.0)
    for _ in range(2):
        links.start(Flow(sender, SimLink(10.0), 50.0, inf, done.append), 0.0)
    while events.step():
        pass
    assert done == [pytest.approx(10.0), pytest.approx(10.0)]


def test_cancelled_flow_frees_the_link_and_is_not_done() -> None:
    events, done = Events(), []
    links = Links(events.at)
    sender = SimLink(10.0)
    gone = Flow(sender, SimLink(10.0), 1000.0, inf, done.append)
    links.start(gone, 0.0)
    links.start(Flow(sender, SimLink(10.0), 50.0, inf, done.append), 0.0)
    events.at(2.0, links.cancel, gone, 2.0)
    while events.step():
        pass
    assert done == [pytest.approx(6.0)]
    assert links.bytes_moved == pytest.approx(60.0)
