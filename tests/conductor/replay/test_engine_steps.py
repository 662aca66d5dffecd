"""A simulated engine takes the steps that the engine's own scheduler plans."""

import random
from collections import deque
from dataclasses import replace
from math import inf

import pytest

from base.request import SampledToken
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from conductor.replay.events import Events
from conductor.replay.sim_engine import SimEngine
from conductor.replay.sim_request import SimRequest
from conductor.replay.trace import TraceRequest
from engine.block_pool import BlockPool
from engine.decode_slack import predicted_step_s
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import StepPlan, StepResult
from tests.engine.builders import make_sequence

CHUNK = 256
PROFILE = replace(
    load_profile("h200-llama8b"),
    prefix_token_s=0.0,
    step_tokens=(128, 256, 512, 768, 1024),
    chunk_step_s=0.003,
    mixed_step_s=0.001,
    chunk_sequence_s=2e-5,
    chunk_token2_s=7e-10,
    attention_rows=128,
    long_chunk_tokens=CHUNK,
)
GPU = CostModel(replace(PROFILE, launches_ahead=True))
CPU = CostModel(replace(PROFILE, launches_ahead=False))
UNFORESEEN = CostModel(
    replace(PROFILE, launches_ahead=False, chunk_step_s=0.0, mixed_step_s=0.0, prefill_fixed_s=0.008)
)
"""A profile that says of no step what its chunk costs: an engine learns it, chunk by chunk."""
BOUNDS = {
    "no bounds": (UNBOUNDED_GAPS,),
    "one mean": (GapBounds(0.012),),
    "tighter than an empty step": (GapBounds(0.003),),
    "longest tighter than an empty step": (GapBounds(longest_s=0.003), GapBounds(0.02, 0.004)),
    "hardly met": (GapBounds(0.0065), GapBounds(0.3)),
    "longest": (GapBounds(longest_s=0.015),),
    "all kinds": (
        UNBOUNDED_GAPS,
        GapBounds(0.008),
        GapBounds(0.02, 0.03),
        GapBounds(0.002),
        GapBounds(0.1, 0.011),
    ),
}
Bounds = tuple[GapBounds, ...]
NOBODY: frozenset[int] = frozenset()
Times = dict[int, tuple[float, float]]
"""When each request had its first token and its last."""


def seeds(count: int) -> list[object]:
    """Return the first numbers; all but one are for the full run."""
    return [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, count))]


def random_rows(seed: int, longest_output: int = 60) -> list[TraceRequest]:
    rng = random.Random(seed)
    now_s, rows = 0.0, []
    for _ in range(60):
        now_s += rng.expovariate(12.0)
        size = rng.choice([rng.randint(2, 60), rng.randint(100, 900), CHUNK * rng.randint(1, 6)])
        rows.append(TraceRequest(now_s, size, rng.randint(1, longest_output), ()))
    return rows


def handed_over(rows: list[TraceRequest], seed: int) -> frozenset[int]:
    """Return the numbers of those that come with their KV and a first token: half of all that can."""
    rng = random.Random(seed)
    return frozenset(n for n, row in enumerate(rows) if rng.random() < 0.5 and row.output_tokens > 1)


def simulated(
    rows: list[TraceRequest],
    cost: CostModel,
    bounds: Bounds = (UNBOUNDED_GAPS,),
    max_batch: int = 1_000,
    handed: frozenset[int] = NOBODY,
) -> tuple[Times, list[SimRequest]]:
    events = Events()
    times: Times = {}
    ended = []

    def start(request: SimRequest, now_s: float) -> float:
        return cost.beside_chunks_s(request.num_tokens, 0)

    def computed(request: SimRequest, now_s: float) -> None:
        if request.computed_tokens < request.num_tokens:
            return
        request.first_token_s = request.token_at_s = request.prefilled_at_s = now_s
        if request.tokens_left > 1:
            engine.join(request, now_s)
        else:
            finished(request, now_s)

    def finished(request: SimRequest, now_s: float) -> None:
        assert request.first_token_s is not None
        times[request.number] = (request.first_token_s, now_s)
        ended.append(request)

    def came(request: SimRequest, now_s: float) -> None:
        if request.number in handed:
            request.first_token_s = request.token_at_s = request.prefilled_at_s = now_s
            request.join_s = cost.profile.join_s
            engine.join(request, now_s)
        else:
            engine.add(request, now_s)

    engine = SimEngine(cost, CHUNK, events.at, start, computed, finished, max_batch=max_batch)
    for number, row in enumerate(rows):
        request = SimRequest(row, number)
        request.gap_bounds = bounds[number % len(bounds)]
        request.order = number
        events.at(row.arrival_s, came, request, row.arrival_s)
    while events.moments:
        events.run_next()
    return times, ended


def seconds_of(plan: StepPlan, cost: CostModel, handed: frozenset[int]) -> float:
    joined = [
        entry
        for entry in plan.entries
        if int(entry.sequence.request_id) in handed and entry.start == entry.sequence.num_prompt_tokens
    ]
    begun = [entry for entry in plan.entries if entry.sequence.first_token_at_s is None and not entry.start]
    beside_s = sum(cost.beside_chunks_s(entry.sequence.num_tokens, 0) for entry in begun)
    return beside_s + len(joined) * cost.profile.join_s + predicted_step_s(plan, cost.step)


def come(
    number: int,
    row: TraceRequest,
    gap_bounds: GapBounds,
    now_s: float,
    first_s: dict[int, float],
    pool: BlockPool,
) -> Sequence:
    """Return the sequence of a row; one that has had its first token comes with its KV, from another node."""
    # another first token than anybody's, so that no prefix is found
    sequence = make_sequence(str(number), [number] * row.num_tokens, row.output_tokens, arrived_at_s=now_s)
    sequence.gap_bounds = gap_bounds
    if number in first_s:
        sequence.token_ids.append(0)
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        sequence.block_table = pool.allocate(-(-sequence.num_prompt_tokens // 16))
        sequence.had_token(now_s)
    return sequence


Flight = tuple[StepPlan, float, float]
"""A step under way, the moment when it ends, and its seconds."""


def launch(
    scheduler: Scheduler, flights: deque[Flight], cost: CostModel, handed: frozenset[int], now_s: float
) -> None:
    """Begin as many steps as may be under way."""
    while len(flights) < 1 + cost.profile.launches_ahead and planned_at_s(scheduler, flights, cost) <= now_s:
        if flights:
            under_way, ends_s, seconds = flights[0]
            plan = scheduler.schedule_ahead(under_way, ends_s - seconds)
        else:
            plan = scheduler.schedule(now_s)
        if plan is None:
            break
        seconds = seconds_of(plan, cost, handed)
        flights.append((plan, (flights[0][1] if flights else now_s) + seconds, seconds))


def planned_at_s(scheduler: Scheduler, flights: deque[Flight], cost: CostModel) -> float:
    """Return when the step after the one under way is planned; 0: none is under way, or as many as may be."""
    if not flights or len(flights) > cost.profile.launches_ahead:
        return 0.0
    plan, ends_s, seconds = flights[0]
    return ends_s - seconds + scheduler.planned_after_s(plan)


def by_the_engine(
    rows: list[TraceRequest],
    cost: CostModel,
    bounds: Bounds = (UNBOUNDED_GAPS,),
    max_batch: int = 1_000,
    handed: frozenset[int] = NOBODY,
) -> tuple[Times, Scheduler]:
    """Run the engine's scheduler as `EngineLoop` does; on a GPU a second step goes before the first lands."""
    pool = BlockPool(20_000)
    scheduler = Scheduler(pool, 16, CHUNK, max_batch, 100_000)
    scheduler.step_cost = cost.step
    arrivals = deque(enumerate(rows))
    first_s: dict[int, float] = {}
    times: Times = {}
    flights: deque[Flight] = deque()
    now_s, is_waiting = 0.0, False
    ended: list[Sequence] = []
    while True:
        if not is_waiting:
            launch(scheduler, flights, cost, handed, now_s)
            planned_s = planned_at_s(scheduler, flights, cost)
            is_waiting = bool(flights) and planned_s <= now_s
        released, ended = ended, []
        for sequence in released:  # by whoever asked for it, once the next step is under way
            scheduler.release(sequence)
        if released and not flights:
            continue
        next_s = inf if not flights else flights[0][1] if is_waiting else planned_s
        if arrivals and arrivals[0][1].arrival_s < next_s:
            now_s = arrivals[0][1].arrival_s
            while arrivals and arrivals[0][1].arrival_s == now_s:
                number, row = arrivals.popleft()
                first_s |= {number: now_s} if number in handed else {}
                scheduler.add(come(number, row, bounds[number % len(bounds)], now_s, first_s, pool))
        elif not is_waiting and flights:
            now_s = planned_s
        elif flights:
            plan, now_s, seconds = flights.popleft()
            is_waiting = False
            tokens = tuple(SampledToken(0, None) if entry.samples else None for entry in plan.entries)
            for output in scheduler.commit(plan, StepResult(tokens), seconds, now_s):
                number = int(output.sequence.request_id)
                if output.tokens:
                    first_s.setdefault(number, now_s)
                if output.finish_reason is not None:
                    times[number] = (first_s[number], now_s)
                    ended.append(output.sequence)
        else:
            return times, scheduler


def are_alike(found: Times, expected: Times, count: int) -> bool:
    """Return whether all requests had their tokens at the same moments; fails with the first that had not."""
    assert found.keys() == expected.keys() == set(range(count))
    for number, pair in expected.items():
        assert found[number] == pytest.approx(pair, abs=1e-9), number
    return True


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("longest_output", [1, 60])
@pytest.mark.parametrize(
    "cost", [GPU, CPU, UNFORESEEN], ids=["launched ahead", "one after the other", "unforeseen"]
)
@pytest.mark.parametrize("seed", seeds(12))
def test_first_and_last_tokens_come_when_the_engines_own_scheduler_has_them(
    seed: int, cost: CostModel, longest_output: int, bounds: Bounds
) -> None:
    rows = random_rows(seed, longest_output)
    found, _ = simulated(rows, cost, bounds)
    expected, _ = by_the_engine(rows, cost, bounds)
    assert are_alike(found, expected, len(rows))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize(
    "cost", [GPU, CPU, UNFORESEEN], ids=["launched ahead", "one after the other", "unforeseen"]
)
@pytest.mark.parametrize("seed", seeds(6))
def test_what_is_handed_over_decodes_beside_prompts_as_the_engines_own_scheduler_has_it(
    seed: int, cost: CostModel, bounds: Bounds
) -> None:
    rows = random_rows(seed)
    handed = handed_over(rows, seed)
    found, _ = simulated(rows, cost, bounds, handed=handed)
    expected, _ = by_the_engine(rows, cost, bounds, handed=handed)
    assert len(handed) > 10
    assert are_alike(found, expected, len(rows))


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("cost", [CPU, UNFORESEEN], ids=["one after the other", "unforeseen"])
@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_step_has_no_more_sequences_than_it_may_and_the_first_come_are_in_it(
    seed: int, max_batch: int, cost: CostModel, bounds: Bounds
) -> None:
    # an engine that launches ahead begins with who waits a step later, which is not simulated
    rows = random_rows(seed)
    handed = handed_over(rows, seed)
    found, _ = simulated(rows, cost, bounds, max_batch=max_batch, handed=handed)
    expected, _ = by_the_engine(rows, cost, bounds, max_batch=max_batch, handed=handed)
    assert found != simulated(rows, cost, bounds, handed=handed)[0], "nobody waited for a place"
    assert are_alike(found, expected, len(rows))


@pytest.mark.parametrize("seed", range(4))
def test_gaps_of_a_sequence_add_up_to_its_time(seed: int) -> None:
    times, ended = simulated(random_rows(seed), GPU)
    for request in ended:
        first_s, last_s = times[request.number]
        assert sum(steps for _, steps, _ in request.gaps) == request.output_tokens - 1
        seconds = sum(steps * (longest - growth * (steps - 1) / 2) for longest, steps, growth in request.gaps)
        assert seconds == pytest.approx(last_s - first_s, abs=1e-9)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_prompts_are_put_off_for_who_has_its_kv_and_no_place_where_nobody_decodes(bounds: Bounds) -> None:
    # the last token of the first prompt is computed as of a sequence, and the second one is put off
    first = [
        TraceRequest(1.0, CHUNK + 1, 5, ()),
        TraceRequest(1.0005, 600, 5, ()),
        TraceRequest(1.001, 40, 40, ()),
    ]
    rows = first + [TraceRequest(1.002 + 0.0005 * number, 50, 3, ()) for number in range(60)]
    found, _ = simulated(rows, CPU, bounds, max_batch=2, handed=frozenset({2}))
    expected, _ = by_the_engine(rows, CPU, bounds, max_batch=2, handed=frozenset({2}))
    assert are_alike(found, expected, len(rows))
    assert simulated(rows, GPU, bounds, max_batch=2, handed=frozenset({2}))[0].keys() == found.keys()


@pytest.mark.parametrize("cost", [GPU, CPU], ids=["launched ahead", "one after the other"])
def test_what_comes_at_one_moment_to_an_idle_node_is_one_step(cost: CostModel) -> None:
    rows = [TraceRequest(1.0, 40, 2, ()), TraceRequest(1.0, 60, 2, ()), TraceRequest(1.0, 80, 3, ())]
    found, _ = simulated(rows, cost, handed=frozenset({2}))
    expected, _ = by_the_engine(rows, cost, handed=frozenset({2}))
    assert found[0][0] == found[1][0] < found[2][1]
    assert are_alike(found, expected, len(rows))
