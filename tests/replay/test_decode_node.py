"""The closed form of decode against steps taken one at a time."""

import random
from heapq import heappop, heappush

import pytest

from conductor.cost_model import CostModel
from conductor.profile import load_profile
from conductor.replay.decode_node import DecodeNode, Sequence
from conductor.replay.outcome import worst_gaps_s

COST = CostModel(load_profile("a800-llama70b"))


class Loop:
    """The simulator's heap, without the simulator."""

    def __init__(self) -> None:
        self._heap = []
        self._count = 0

    def at(self, moment_s, call, *arguments) -> None:
        self._count += 1
        heappush(self._heap, (moment_s, self._count, call, arguments))

    def run(self) -> None:
        while self._heap:
            _, _, call, arguments = heappop(self._heap)
            call(*arguments)


def simulate(jobs, capacity: int = 10**9):
    """Return {owner: (end, mean of the longest tenth of gaps)} by closed form."""
    loop, ends = Loop(), {}

    def finished(sequence, now_s) -> None:
        ends[sequence.owner] = (now_s, worst_gaps_s(sequence.gaps, sum(gap[1] for gap in sequence.gaps)))

    node = DecodeNode(COST, capacity, loop.at, finished)
    for owner, (at_s, context, steps) in enumerate(jobs):
        loop.at(at_s, lambda s, now_s: node.join(s, now_s), Sequence(owner, context, steps, at_s), at_s)
    loop.run()
    return ends, node


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
    node = DecodeNode(COST, 10**9, loop.at, lambda sequence, now_s: None)
    for owner in range(3):
        node.join(Sequence(owner, 1_000, 50, 0.0), 0.0)
    left = node.evict_all(0.5)
    assert [sequence.owner for sequence in left] == [0, 1, 2]
    assert all(0 < sequence.steps_left < 50 for sequence in left)
    assert all(sequence.context_tokens == 1_050 - sequence.steps_left for sequence in left)
    assert (node.batch, node.context_tokens) == (0, 0)
