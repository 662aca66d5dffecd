"""The scheduler under budgets: who decodes has its tokens in time, and all end with the same tokens."""

import random
from dataclasses import dataclass, field

import pytest

from base.request import FinishReason
from base.step_budget import STARVED_STEPS, UNBOUNDED_GAPS, GapBounds
from base.step_cost import StepCost
from engine.block_pool import BlockPool
from engine.decode_slack import predicted_step_s
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan
from tests.engine.builders import make_sequence
from tests.engine.fakes import FakeDevice, continuation

BLOCK_SIZE = 4
COST = StepCost(
    prefill_token_s=1e-3,
    prefill_token2_s=1e-7,
    decode_fixed_s=0.01,
    decode_sequence_s=1e-4,
    decode_context_token_s=1e-6,
    chunk_step_s=0.004,
)


@dataclass
class TimedBench:
    """A scheduler on a fake device, on which each step takes what is predicted, times `slowness`."""

    cost: StepCost | None = COST
    slowness: float = 1.0
    num_blocks: int = 2000
    max_batch: int = 32
    now_s: float = 0.0
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    last_at_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.device = FakeDevice(self.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, BLOCK_SIZE, 256, self.max_batch, 4000)
        self.scheduler.step_cost = self.cost

    def plan(self) -> StepPlan | None:
        return self.scheduler.schedule(self.now_s)

    def land(self, plan: StepPlan) -> None:
        seconds = predicted_step_s(plan, COST) * self.slowness
        self.now_s += seconds
        for output in self.scheduler.commit(plan, self.device.execute(plan), seconds, self.now_s):
            name = output.sequence.request_id
            if output.tokens:
                if name in self.last_at_s:
                    self.gaps_s.setdefault(name, []).append(self.now_s - self.last_at_s[name])
                self.last_at_s[name] = self.now_s
            if output.finish_reason is not None:
                self.scheduler.release(output.sequence)
        self.scheduler.check()
        self.pool.check()

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.land(plan)
        return plan

    def run(self) -> None:
        while self.step() is not None:
            pass

    def decoding(self, name: str, bounds: GapBounds, max_tokens: int = 200, size: int = 4) -> Sequence:
        """Return a sequence that has had its first token."""
        number = len(self.last_at_s) + 1
        sequence = make_sequence(name, [number] * size, max_tokens, arrived_at_s=self.now_s)
        sequence.gap_bounds = bounds
        self.scheduler.add(sequence)
        while sequence.first_token_at_s is None:
            self.step()
        return sequence

    def prompt(self, name: str, size: int = 400) -> Sequence:
        sequence = make_sequence(name, [40 + len(name)] * size, 4, arrived_at_s=self.now_s)
        self.scheduler.add(sequence)
        return sequence


def generated(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.9], ids="{} times as slow as predicted".format)
@pytest.mark.parametrize(
    "bounds", [GapBounds(0.05), GapBounds(longest_s=0.08), GapBounds(0.03, 0.2)], ids=str
)
def test_bounds_are_kept_beside_long_prompts(bounds: GapBounds, slowness: float) -> None:
    bench = TimedBench(slowness=slowness)
    first = bench.decoding("first", GapBounds(*(bound * slowness for bound in bounds)))
    for number in range(5):
        bench.prompt(f"prompt{number}")
    bench.run()
    assert first.finish_reason is FinishReason.LENGTH
    gaps_s = bench.gaps_s["first"]
    assert sum(gaps_s) / len(gaps_s) <= bounds.mean_s * slowness
    assert max(gaps_s) <= bounds.longest_s * slowness


def test_without_a_bound_no_gap_is_longer_than_the_target() -> None:
    bench = TimedBench()
    bench.decoding("first", UNBOUNDED_GAPS)
    bench.prompt("prompt", 1500)
    bench.run()
    assert 0.04 < max(bench.gaps_s["first"]) <= 0.05


def test_a_step_is_whole_where_nobody_has_said_what_steps_cost() -> None:
    bench = TimedBench(cost=None)
    bench.decoding("first", GapBounds(0.011))
    bench.prompt("prompt", 1500)
    plan = bench.step()
    assert plan is not None
    assert plan.num_tokens == 256


@pytest.mark.parametrize("bounds", [GapBounds(0.001), GapBounds(0.0107), GapBounds(longest_s=0.002)], ids=str)
def test_a_bound_that_an_empty_step_breaks_or_hardly_keeps_starves_no_prompt(bounds: GapBounds) -> None:
    bench = TimedBench()
    for name in "abc":
        bench.decoding(name, bounds, max_tokens=3000)
    prompt = bench.prompt("prompt")
    while prompt.first_token_at_s is None:
        assert bench.step() is not None
    assert generated(prompt)[:1] == continuation(prompt.token_ids[: prompt.num_prompt_tokens], 1)


def test_a_prompt_for_which_no_place_is_left_in_most_steps_begins_all_the_same() -> None:
    """Places that come free are taken by sequences that came after it, whose bounds leave it nothing."""
    bench, joined, bounds = TimedBench(max_batch=16), 0, GapBounds(0.016)
    for number in range(16):
        bench.decoding(f"first{number}", bounds, max_tokens=20 + 3 * number)
    prompt = bench.prompt("prompt", 100)
    num_steps = 0
    while not prompt.num_computed_tokens:
        if bench.scheduler.num_waiting < 2:
            joined += 1
            later = make_sequence(f"later{joined}", [joined] * 8, 48, arrived_at_s=bench.now_s + 1e-6)
            later.token_ids += continuation(later.token_ids, 1)
            later.gap_bounds = bounds
            later.num_computed_tokens, later.block_table = 8, bench.pool.allocate(2)
            bench.device.write(StepEntry(later, 0, 8, tuple(later.block_table), False), later.token_ids[:8])
            later.had_token(bench.now_s)
            bench.scheduler.add(later)
        assert bench.step() is not None
        num_steps += 1
        assert num_steps <= 2 * STARVED_STEPS


def test_a_longest_gap_shorter_than_an_empty_step_counts_as_the_target() -> None:
    bench = TimedBench()
    bench.decoding("first", GapBounds(longest_s=0.002))
    bench.prompt("prompt", 1500)
    bench.run()
    assert 0.04 < max(bench.gaps_s["first"]) <= 0.05


def test_a_bound_that_is_lost_binds_no_more() -> None:
    bench = TimedBench()
    late = bench.decoding("late", GapBounds(0.02), max_tokens=20)
    bench.now_s += 5.0  # the process stood still
    bench.prompt("prompt")
    plan = bench.step()
    assert plan is not None
    assert late.is_mean_lost
    assert plan.num_tokens > 1


def test_a_bound_that_may_yet_be_kept_has_nothing_beside_it_until_it_is() -> None:
    bench = TimedBench()
    late = bench.decoding("late", GapBounds(0.02), max_tokens=1000)
    bench.now_s += 0.1
    bench.prompt("prompt", 40)
    plan = bench.step()
    assert plan is not None
    assert plan.num_tokens == 1
    assert not late.is_mean_lost


def test_a_budget_that_shrinks_to_nothing_between_two_chunks_loses_nothing_of_the_first() -> None:
    bench = TimedBench()
    bench.decoding("calm", UNBOUNDED_GAPS, max_tokens=400)
    prompt = bench.prompt("prompt", 600)
    while not prompt.num_computed_tokens:
        bench.step()
    plan = bench.plan()
    assert plan is not None
    # It comes with its KV while a chunk is under way, and its next token is due before anything else fits.
    moved = make_sequence("moved", [9] * 5, 300, arrived_at_s=bench.now_s)
    moved.token_ids.append(continuation(moved.token_ids, 1)[0])
    moved.num_computed_tokens, moved.block_table = 5, bench.pool.allocate(2)
    arrived = StepEntry(moved, 0, 5, tuple(moved.block_table), samples=False)
    bench.device.write(arrived, moved.token_ids[:5])
    moved.gap_bounds = GapBounds(0.0125)
    moved.had_token(bench.now_s)
    bench.scheduler.add(moved)
    bench.land(plan)
    computed = prompt.num_computed_tokens
    plan = bench.step()
    assert plan is not None
    assert {entry.sequence.request_id for entry in plan.entries} == {"calm", "moved"}
    assert prompt.num_computed_tokens == computed
    bench.run()
    assert prompt.finish_reason is FinishReason.LENGTH
    assert generated(prompt) == continuation(prompt.token_ids[: prompt.num_prompt_tokens], 4)


def test_prompts_get_of_steps_that_are_planned_ahead_what_they_get_of_others() -> None:
    chunks = []
    for is_ahead in (False, True):
        bench = TimedBench()
        bench.decoding("first", GapBounds(0.0125), max_tokens=500)
        prompt = bench.prompt("prompt", 900)
        plan = bench.plan()
        taken: list[int] = []
        while prompt.first_token_at_s is None:
            assert plan is not None
            ahead = bench.scheduler.schedule_ahead(plan, bench.now_s) if is_ahead else None
            taken.append(sum(entry.num_tokens for entry in plan.entries if entry.sequence is prompt))
            bench.land(plan)
            plan = ahead or bench.plan()
        assert taken.count(0) > 1, "they are passed over until enough is saved"
        chunks.append(taken)
    assert chunks[0] == chunks[1]


@pytest.mark.parametrize("num_blocks", [120, 2000], ids="{} blocks".format)
@pytest.mark.parametrize("seed", range(6))
def test_everything_ends_with_the_tokens_that_it_has_without_budgets(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    bench = TimedBench(slowness=rng.choice([0.3, 1.0, 4.0]), num_blocks=num_blocks)
    sequences = []
    for number in range(40):
        size = rng.choice([1, 3, 17, 60, 150])
        sequence = make_sequence(str(number), [number] * size, rng.randint(1, 30), arrived_at_s=bench.now_s)
        sequence.priority = rng.choice([0, 0, 0, 1])
        sequence.gap_bounds = GapBounds(
            rng.choice([1e-6, 0.0105, 0.013, 0.02, 0.5, float("inf")]),
            rng.choice([1e-6, 0.012, 0.05, float("inf"), float("inf")]),
        )
        bench.scheduler.add(sequence)
        sequences.append(sequence)
        for _ in range(rng.randint(0, 4)):
            bench.step()
        if rng.random() < 0.1:
            victim = rng.choice(sequences)
            if victim.finish_reason is None:
                bench.scheduler.release(victim)
                sequences.remove(victim)
    bench.run()
    assert not bench.scheduler.num_running
    assert not bench.scheduler.num_waiting
    for sequence in sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert generated(sequence) == continuation(prompt, sequence.stop.max_tokens)
    assert bench.pool.num_held == 0


@pytest.mark.parametrize(("tokens", "num_steps"), [(128, 2), (2, 1)])
def test_long_prompts_are_a_step_each_and_short_ones_are_one(tokens: int, num_steps: int) -> None:
    bench = TimedBench()
    for number in range(2):
        bench.scheduler.add(make_sequence(f"prompt {number}", [1 + number] * tokens, 1))
    plans = list(iter(bench.step, None))
    assert len(plans) == num_steps
    assert len(bench.last_at_s) == 2


def test_a_prompt_that_waits_for_another_finds_what_that_has_computed() -> None:
    bench, shared = TimedBench(), [1] * 160
    for number in range(2):
        bench.scheduler.add(make_sequence(f"prompt {number}", shared + [2 + number] * 40, 1))
    plans = list(iter(bench.step, None))
    chunks = [[(entry.start, entry.num_tokens) for entry in plan.entries] for plan in plans]
    assert chunks == [[(0, 200)], [(160, 40)]]
