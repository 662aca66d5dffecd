"""The scheduler: what is in a step that is planned before the result of the one before is known."""

from base.clock import SystemClock
from engine.arrivals import PrefixArrivals
from engine.sequence import Sequence
from engine.step import StepPlan
from tests.engine.builders import make_sequence
from tests.engine.fakes import continuation
from tests.engine.scheduler_bench import Bench, generated


def with_kv(bench: Bench, name: str, first_token: int = 100) -> Sequence:
    """Return a sequence of two full blocks and a token, which has the KV of all but that, not queued yet."""
    prompt = [*range(first_token, first_token + 8)]
    prefill = make_sequence(f"{name} prefill", prompt, max_tokens=1)
    bench.scheduler.add(prefill)
    ((token,),) = (output.tokens for output in bench.step() or [])
    sequence = make_sequence(name, prompt, max_tokens=3, arrived_at_s=1.0)
    sequence.token_ids.append(token.token_id)
    sequence.num_computed_tokens = 8
    sequence.block_table += prefill.block_table
    bench.pool.hold(sequence.block_table)
    bench.scheduler.release(prefill)
    return sequence


def decoding_step(bench: Bench, max_tokens: int = 9) -> StepPlan:
    """Return the plan of a step, under way, of a sequence that decodes."""
    bench.scheduler.add(make_sequence("decoding", range(6), max_tokens=max_tokens))
    bench.step()
    plan = bench.scheduler.schedule()
    assert plan is not None
    return plan


def shape_of(plan: StepPlan | None) -> list[tuple[str, int]] | None:
    return plan and sorted((entry.sequence.request_id, entry.num_tokens) for entry in plan.entries)


def test_who_comes_with_its_kv_joins_a_step_that_is_planned_ahead() -> None:
    bench = Bench()
    joining = with_kv(bench, "joining")
    plan = decoding_step(bench)
    bench.scheduler.add(joining)
    ahead = bench.scheduler.schedule_ahead(plan)
    assert shape_of(ahead) == [("decoding", 1), ("joining", 1)]
    for each in (plan, ahead):
        bench.scheduler.commit(each, bench.device.execute(each))
        bench.check()
    bench.run()
    assert generated(joining) == continuation(range(100, 108), 3)


def test_who_ends_is_not_in_the_step_ahead_that_others_join() -> None:
    bench = Bench()
    joining = with_kv(bench, "joining")
    plan = decoding_step(bench, max_tokens=2)
    bench.scheduler.add(joining)
    assert shape_of(bench.scheduler.schedule_ahead(plan)) == [("joining", 1)]


def test_as_many_join_a_step_ahead_as_there_are_places() -> None:
    bench = Bench(max_batch=2)
    first, second = (with_kv(bench, name, token) for name, token in (("first", 100), ("second", 200)))
    plan = decoding_step(bench)
    bench.scheduler.add(first)
    bench.scheduler.add(second)
    assert shape_of(bench.scheduler.schedule_ahead(plan)) == [("decoding", 1), ("first", 1)]
    assert bench.scheduler.num_waiting == 1


def test_nobody_joins_a_step_ahead_without_a_block_for_its_token() -> None:
    bench = Bench(num_blocks=6)
    joining = with_kv(bench, "joining")
    plan = decoding_step(bench)
    bench.scheduler.add(joining)
    held = bench.pool.allocate(bench.pool.num_available)
    ahead = bench.scheduler.schedule_ahead(plan)
    assert shape_of(ahead) == [("decoding", 1)]
    assert bench.scheduler.num_waiting == 1
    bench.pool.release(held)
    bench.scheduler.commit(plan, bench.device.execute(plan))
    assert ahead is not None
    assert shape_of(bench.scheduler.schedule_ahead(ahead)) == [("decoding", 1), ("joining", 1)]


def test_a_block_that_was_promised_to_who_joins_ahead_is_promised_no_more() -> None:
    bench = Bench(num_blocks=6)
    joining = with_kv(bench, "joining")
    decoding = make_sequence("decoding", range(6), max_tokens=9)
    bench.scheduler.add(decoding)
    bench.step()
    held = bench.pool.allocate(bench.pool.num_available)
    bench.scheduler.add(joining)
    plan = bench.scheduler.schedule()
    assert shape_of(plan) == [("decoding", 1)]
    assert bench.pool.num_promised == 1
    bench.pool.release(held)
    assert plan is not None
    assert shape_of(bench.scheduler.schedule_ahead(plan)) == [("decoding", 1), ("joining", 1)]
    assert bench.pool.num_promised == 0


def test_nobody_joins_behind_a_step_that_may_lose_the_prefix_of_a_prompt() -> None:
    bench = Bench()
    joining = with_kv(bench, "joining")
    loading = make_sequence("loading", range(6), max_tokens=9)
    loading.arrivals = PrefixArrivals((1,), SystemClock(), 0)
    bench.scheduler.add(loading)
    plan = bench.scheduler.schedule()
    assert plan is not None
    bench.scheduler.add(joining)
    assert bench.scheduler.schedule_ahead(plan) is None
    bench.scheduler.commit(plan, bench.device.execute(plan))
    plan = bench.scheduler.schedule()
    assert shape_of(plan) == [("joining", 1), ("loading", 1)]


def test_prompts_begin_and_go_on_in_a_step_that_is_planned_ahead() -> None:
    bench = Bench()
    plan = decoding_step(bench)
    prompt = make_sequence("prompt", range(200, 212), arrived_at_s=2.0)
    bench.scheduler.add(prompt)
    chunks = []
    while not prompt.num_generated_tokens:
        ahead = bench.scheduler.schedule_ahead(plan)
        bench.scheduler.commit(plan, bench.device.execute(plan))
        bench.check()
        assert ahead is not None
        chunks.append(dict(shape_of(ahead) or []))
        plan = ahead
    assert chunks == [
        {"decoding": 1, "prompt": 7},
        {"decoding": 1, "prompt": 5},
        {"decoding": 1, "prompt": 1},
    ]


def test_who_ends_a_prompt_is_beside_one_that_begins_ahead() -> None:
    bench = Bench()
    bench.scheduler.add(make_sequence("first", range(6), max_tokens=1))
    plan = bench.scheduler.schedule()
    assert plan is not None
    assert bench.scheduler.schedule_ahead(plan) is None
    bench.scheduler.add(make_sequence("second", range(50, 56), arrived_at_s=1.0))
    assert shape_of(bench.scheduler.schedule_ahead(plan)) == [("second", 6)]


def test_a_prompt_waits_for_a_chunk_under_way_whose_blocks_it_can_match() -> None:
    bench = Bench()
    bench.scheduler.add(make_sequence("first", range(8), max_tokens=3))
    plan = bench.scheduler.schedule()
    assert plan is not None
    second = make_sequence("second", [*range(8), 60], arrived_at_s=1.0)
    bench.scheduler.add(second)
    bench.scheduler.add(make_sequence("third", range(70, 73), arrived_at_s=2.0))
    ahead = bench.scheduler.schedule_ahead(plan)
    assert shape_of(ahead) == [("first", 1)], "nobody overtakes it"
    bench.scheduler.commit(plan, bench.device.execute(plan))
    assert ahead is not None
    assert shape_of(bench.scheduler.schedule_ahead(ahead)) == [("first", 1), ("second", 1), ("third", 3)]
    assert second.num_matched_tokens == 8


def test_a_prefix_that_is_still_coming_is_in_no_step_that_is_planned_ahead() -> None:
    bench = Bench()
    plan = decoding_step(bench)
    loading = make_sequence("loading", range(50, 56), arrived_at_s=1.0)
    loading.arrivals = PrefixArrivals((1,), SystemClock(), 0)
    bench.scheduler.add(loading)
    assert bench.scheduler.schedule_ahead(plan) is None
    assert bench.scheduler.num_waiting == 1
