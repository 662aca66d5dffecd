"""The closed form of decode against steps taken one at a time."""

import random
from dataclasses import replace
from heapq import heappop, heappush

import pytest

from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from conductor.replay.outcome import worst_gaps_s
from conductor.replay.sim_engine import SimEngine
from conductor.replay.sim_request import SimRequest
from conductor.replay.trace import TraceRequest

COST = CostModel(load_profile("a800-llama70b"))


class Loop:
    """The simulator's heap, without the simulator."""

    def __init__(self) -> None:
        self._heap = []
        self._count = 0

    def at(self, moment_s, call, *arguments) -> None:
        self._count += 1
        heappush(self._heap, (moment_s, self._count, call, arguments))

    def run(self, until_s: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            _, _, call, arguments = heappop(self._heap)
            call(*arguments)


def simulate(jobs, capacity: int = 10**9):
    """Return {owner: (end, mean of the longest tenth of gaps)} by closed form."""
    loop, ends = Loop(), {}

    def finished(request, now_s) -> None:
        ends[request.number] = (now_s, worst_gaps_s(request.gaps, sum(gap[1] for gap in request.gaps)))

    node = decode_engine(loop, finished, capacity)
    for owner, (at_s, context, steps) in enumerate(jobs):
        loop.at(at_s, node.join, prefilled(owner, context, steps, at_s), at_s)
    loop.run()
    return ends, node


def decode_engine(loop, finished, capacity: int = 10**9) -> SimEngine:
    cost = CostModel(replace(COST.profile, device_kv_tokens=capacity))
    return SimEngine(cost, 0, loop.at, lambda request, now_s: 0.0, lambda request, now_s: None, finished)


def prefilled(owner: int, context: int, steps: int, at_s: float = 0.0) -> SimRequest:
    """Return a request whose prompt was computed elsewhere: `steps` tokens after the first, at `at_s`."""
    request = SimRequest(TraceRequest(0.0, context, steps + 1, ()), owner)
    request.token_at_s = at_s
    return request


def step_by_step(jobs):
    """The same, one step at a time."""
    waiting = sorted((at_s, owner, context, steps) for owner, (at_s, context, steps) in enumerate(jobs))
    running, ends, now_s = {}, {}, 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s:
            at_s, owner, context, steps = waiting.pop(0)
            running[owner] = [context, steps, at_s, []]
        now_s += COST.decode_step_s(len(running), sum(state[0] for state in running.values()))
        for owner, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            state[3].append(now_s - state[2])
            state[2] = now_s
            if not state[1]:
                gaps = sorted(state[3], reverse=True)
                longest = gaps[: max(1, -(-len(gaps) // 10))]
                ends[owner] = (now_s, sum(longest) / len(longest))
                del running[owner]
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_closed_form_agrees_with_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [(rng.random() * 8, rng.randrange(10, 60_000), rng.randrange(1, 200)) for _ in range(25)]
    ends, node = simulate(jobs)
    expected = step_by_step(jobs)
    for owner, (end_s, worst_s) in expected.items():
        assert ends[owner][0] == pytest.approx(end_s, rel=1e-6)
        assert ends[owner][1] == pytest.approx(worst_s, rel=1e-3)
    assert (node.batch, node.context_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_every_sequence_ends_however_small_the_capacity(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [(rng.random() * 4, rng.randrange(10, 900), rng.randrange(1, 400)) for _ in range(20)]
    ends, node = simulate(jobs, capacity=1_500)
    assert sorted(ends) == list(range(20))
    assert (node.batch, node.context_tokens, node.num_waiting) == (0, 0, 0)


def test_growth_past_the_capacity_preempts_the_newest() -> None:
    ends, node = simulate([(0.0, 500, 300), (0.1, 500, 300)], capacity=1_200)
    assert node.num_preemptions >= 1
    assert ends[0][0] < ends[1][0]


def test_dead_node_gives_back_every_sequence() -> None:
    loop = Loop()
    node = decode_engine(loop, lambda request, now_s: None)
    for owner in range(3):
        node.join(prefilled(owner, 1_000, 50), 0.0)
    loop.run(until_s=0.5)
    left = node.evict_all(0.5)
    assert [request.number for request in left] == [0, 1, 2]
    assert left[0].steps_left < 49, "the first decoded alone for a step, and then beside the others"
    assert all(0 < request.steps_left < 50 for request in left)
    assert all(request.context_tokens == 1_050 - request.steps_left for request in left)
    assert all(request.token_at_s <= 0.5 for request in left)
    assert (node.batch, node.context_tokens) == (0, 0)


def test_a_prompt_is_one_step_where_chunks_have_no_length() -> None:
    loop, done = Loop(), []

    def start(request, now_s) -> float:
        return COST.prefill_s(request.num_tokens, 0)

    def prefilled_at(request, now_s) -> None:
        done.append((request.number, now_s))

    node = SimEngine(COST, 0, loop.at, start, prefilled_at, lambda request, now_s: None)
    for number, tokens in enumerate((3_000, 200, 700)):
        request = SimRequest(TraceRequest(0.0, tokens, 1, ()), number)
        request.order = number
        loop.at(0.0, node.add, request, 0.0)
    loop.run()
    seconds = [COST.prefill_s(tokens, 0) for tokens in (3_000, 200, 700)]
    assert done == [(number, pytest.approx(sum(seconds[: number + 1]))) for number in range(3)]
    assert node.busy_s == pytest.approx(sum(seconds))


def test_a_prompt_that_waited_for_its_prefix_goes_before_later_ones() -> None:
    loop, started = Loop(), []

    def start(request, now_s) -> float:
        started.append(request.number)
        return 1.0

    node = SimEngine(COST, 0, loop.at, start, lambda request, now_s: None, lambda request, now_s: None)
    for number, at_s in ((0, 0.0), (2, 0.1), (3, 0.2), (1, 0.3)):
        request = SimRequest(TraceRequest(0.0, 100, 1, ()), number)
        request.order = number
        loop.at(at_s, node.add, request, at_s)
    loop.run()
    assert started == [0, 1, 2, 3]
