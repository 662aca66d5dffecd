"""The scheduler: what runs in a step, in which order, and that everything ends."""

import random

import pytest

from base.errors import CapacityError, InvalidRequestError
from base.request import FinishReason, SamplingParams, StopParams
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.builders import make_sequence
from tests.engine.fakes import continuation
from tests.engine.scheduler_bench import BLOCK_SIZE, Bench, generated


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last() -> None:
    bench = Bench(chunk_tokens=8)
    bench.scheduler.add(make_sequence("a", range(20), max_tokens=1))
    outputs = [bench.step()[0] for _ in range(3)]
    assert [len(output.tokens) for output in outputs] == [0, 0, 1]
    assert [plan.entries[0].num_tokens for plan in bench.device.plans] == [8, 8, 4]


def test_a_chunk_leaves_room_for_the_sequences_that_decode_beside_it() -> None:
    bench = Bench(chunk_tokens=8)
    bench.scheduler.add(make_sequence("a", range(4), max_tokens=9))
    bench.step()
    bench.scheduler.add(make_sequence("b", range(100, 120), arrived_at_s=1.0))
    bench.step()
    assert bench.shape_of_last_step() == [("a", 1), ("b", 7)]


def test_a_chunk_leaves_room_for_who_comes_with_its_kv_in_the_same_step() -> None:
    bench = Bench(chunk_tokens=8)
    bench.scheduler.add(make_sequence("prompt", range(100, 120)))
    moved = make_sequence("moved", range(5), arrived_at_s=1.0)
    moved.block_table += bench.pool.allocate(2)
    moved.num_computed_tokens = 4
    bench.scheduler.add(moved)
    plan = bench.scheduler.schedule()
    assert plan is not None
    assert [entry.num_tokens for entry in plan.entries] == [1, 7]


def test_prompts_get_half_of_a_step_whatever_decodes() -> None:
    bench = Bench(chunk_tokens=8)
    for number in range(6):
        bench.scheduler.add(make_sequence(str(number), [50 + number], max_tokens=9))
    bench.step()
    bench.scheduler.add(make_sequence("prompt", range(100, 120), arrived_at_s=1.0))
    bench.step()
    assert dict(bench.shape_of_last_step())["prompt"] == 4
    assert len(bench.shape_of_last_step()) == 7


def test_chunks_share_the_budget_in_order_of_rank() -> None:
    bench = Bench(chunk_tokens=8)
    bench.scheduler.add(make_sequence("late", range(6), arrived_at_s=2.0))
    bench.scheduler.add(make_sequence("early", range(50, 55), arrived_at_s=1.0))
    bench.scheduler.add(make_sequence("urgent", range(60, 62), arrived_at_s=3.0, priority=1))
    bench.step()
    assert dict(bench.shape_of_last_step()) == {"urgent": 2, "early": 5, "late": 1}


def test_a_cached_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    bench = Bench(chunk_tokens=64)
    bench.scheduler.add(make_sequence("a", range(12), max_tokens=1))
    bench.run()
    again = make_sequence("b", range(12), max_tokens=1)
    bench.scheduler.add(again)
    bench.run()
    assert bench.shape_of_last_step() == [("b", 4)]
    assert generated(again) == continuation(range(12), 1)


def test_sequences_that_arrive_together_share_the_prefix_computed_first() -> None:
    bench = Bench(chunk_tokens=8)
    for name in ("a", "b"):
        bench.scheduler.add(make_sequence(name, [*range(17), ord(name)], max_tokens=1))
    bench.run()
    computed = {name: 0 for name in ("a", "b")}
    for plan in bench.device.plans:
        for entry in plan.entries:
            computed[entry.sequence.request_id] += entry.num_tokens
    assert computed["a"] == 18
    assert computed["b"] < 18


def test_a_sequence_handed_off_only_decodes() -> None:
    bench = Bench()
    first = make_sequence("prefill", range(10), max_tokens=1)
    bench.scheduler.add(first)
    outputs = [bench.step(), bench.step()]
    sampled = outputs[-1][0].tokens[0].token_id
    handed_off = make_sequence("decode", range(10), max_tokens=5)
    handed_off.token_ids.append(sampled)
    handed_off.num_computed_tokens = 10
    handed_off.block_table = first.block_table.copy()
    bench.pool.hold(handed_off.block_table)
    bench.scheduler.release(first)
    bench.scheduler.add(handed_off)
    bench.run()
    assert generated(handed_off) == continuation(range(10), 5)
    assert all(plan.num_tokens == 1 for plan in bench.device.plans[2:])


def test_a_finished_sequence_keeps_its_blocks_until_release() -> None:
    bench = Bench()
    sequence = make_sequence("a", range(6), max_tokens=1)
    bench.scheduler.add(sequence)
    (output,) = bench.step()
    assert output.finish_reason is FinishReason.LENGTH
    assert bench.pool.num_held == 2
    bench.scheduler.release(sequence)
    bench.scheduler.release(sequence)
    assert bench.pool.num_held == 0


def test_generated_tokens_fill_blocks_that_later_prompts_match() -> None:
    bench = Bench()
    first = make_sequence("a", range(4), max_tokens=9)
    bench.scheduler.add(first)
    bench.run()
    second = make_sequence("b", first.token_ids, max_tokens=1)
    bench.scheduler.add(second)
    bench.run()
    assert bench.shape_of_last_step() == [("b", 1)]


def test_stop_tokens_end_a_sequence_and_max_tokens_does_too() -> None:
    tokens = continuation(range(5), 6)
    stop = StopParams(max_tokens=6, stop_token_ids=(tokens[3],))
    sequence = make_sequence("a", range(5), stop=stop)
    bench = Bench()
    bench.scheduler.add(sequence)
    bench.run()
    assert generated(sequence) == tokens[: tokens.index(tokens[3]) + 1]
    assert sequence.finish_reason is FinishReason.STOP


def test_the_model_length_ends_a_sequence() -> None:
    bench = Bench(max_model_len=12)
    sequence = make_sequence("a", range(10), max_tokens=50)
    bench.scheduler.add(sequence)
    bench.run()
    assert sequence.num_tokens == 12
    assert sequence.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "error"),
    [
        (0, 1, InvalidRequestError),
        (64, 1, InvalidRequestError),
        (17, 1, CapacityError),
        (10, 8, CapacityError),
    ],
)
def test_what_can_never_finish_is_refused_when_added(prompt_tokens, max_tokens, error) -> None:
    bench = Bench(num_blocks=4)
    with pytest.raises(error):
        bench.scheduler.add(make_sequence("a", range(prompt_tokens), max_tokens))
    assert bench.step() is None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"token_ids": [3, 50]}),
        ("prompt", {"token_ids": [-1]}),
        ("logit_bias", {"sampling": SamplingParams(logit_bias=((50, 1.0),))}),
        ("stop_token_ids", {"stop": StopParams(1, stop_token_ids=(2, 1_000_000))}),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_by_the_name_of_its_field(param, fields) -> None:
    scheduler = Scheduler(BlockPool(8), BLOCK_SIZE, 8, 8, 64, vocab_size=50)
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_sequence("a", **({"token_ids": [1]} | fields)))
    assert caught.value.param == param
    assert scheduler.num_waiting == 0


def test_the_longest_sequence_that_fits_finishes() -> None:
    bench = Bench(num_blocks=4)
    sequence = make_sequence("a", range(10), max_tokens=7)
    bench.scheduler.add(sequence)
    bench.run()
    assert generated(sequence) == continuation(range(10), 7)


def test_growth_takes_blocks_from_the_lowest_rank() -> None:
    bench = Bench(num_blocks=5)
    old = make_sequence("old", range(8), max_tokens=10, arrived_at_s=1.0)
    young = make_sequence("young", range(50, 58), max_tokens=8, arrived_at_s=2.0)
    bench.scheduler.add(old)
    bench.scheduler.add(young)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert not young.block_table
    assert old.block_table
    bench.run()
    assert generated(old) == continuation(range(8), 10)
    assert generated(young) == continuation(range(50, 58), 8)


def test_blocks_held_elsewhere_delay_a_sequence_and_preempt_nobody() -> None:
    bench = Bench(num_blocks=4)
    reserved = bench.pool.allocate(3)
    sequence = make_sequence("a", range(8), max_tokens=2)
    bench.scheduler.add(sequence)
    assert bench.step() is None
    bench.pool.release(reserved)
    bench.run()
    assert generated(sequence) == continuation(range(8), 2)
    assert bench.scheduler.num_preemptions == 0


def test_a_steady_stream_of_reservations_does_not_starve_a_sequence_that_waits() -> None:
    """Two reservations are there, one ends at each step, and the sequence needs more than that gives."""
    bench = Bench(num_blocks=6)
    reservations = [bench.pool.allocate_spare(2) for _ in range(2)]
    sequence = make_sequence("a", range(14), max_tokens=2)
    bench.scheduler.add(sequence)
    refused = 0
    for _ in range(10):
        bench.step()
        bench.pool.release(reservations.pop(0) if reservations else [])
        try:
            reservations.append(bench.pool.allocate_spare(2))
        except CapacityError:
            refused += 1
    assert generated(sequence) == continuation(range(14), 2)
    assert 0 < refused < 5
    bench.scheduler.release(sequence)
    assert bench.pool.num_promised == 0


def test_a_promise_ends_with_the_sequence_that_it_was_made_for() -> None:
    bench = Bench(num_blocks=4)
    reserved = bench.pool.allocate(3)
    sequence = make_sequence("a", range(8), max_tokens=2)
    bench.scheduler.add(sequence)
    bench.step()
    with pytest.raises(CapacityError, match="promised"):
        bench.pool.allocate_spare(1)
    bench.scheduler.release(sequence)
    bench.pool.release(bench.pool.allocate_spare(1) + reserved)


def test_handed_off_sequences_give_way_when_nothing_else_can_run() -> None:
    """Each brought its blocks along and needs one more; there is none."""
    bench = Bench(num_blocks=4)
    sequences = []
    for name, start in (("a", 0), ("b", 20)):
        prompt = list(range(start, start + 8))
        giver = make_sequence(f"{name}-prefill", prompt, max_tokens=1)
        bench.scheduler.add(giver)
        while giver.finish_reason is None:
            bench.step()
        sequence = make_sequence(name, prompt, max_tokens=4, arrived_at_s=float(start))
        sequence.token_ids += generated(giver)
        sequence.num_computed_tokens = 8
        sequence.block_table = bench.pool.match(giver.block_hashes)
        bench.scheduler.release(giver)
        sequences.append(sequence)
    for sequence in sequences:
        bench.scheduler.add(sequence)
    bench.run()
    for sequence in sequences:
        assert generated(sequence) == continuation(sequence.token_ids[:8], 4)


def test_who_waits_for_a_place_and_has_blocks_gets_both_when_nothing_else_can_run() -> None:
    """The one that runs needs a block, and whoever has the others goes before it."""
    bench = Bench(num_blocks=4, max_batch=1)
    giver = make_sequence("urgent", range(20, 28), max_tokens=1)
    bench.scheduler.add(giver)
    bench.step()
    urgent = make_sequence("urgent", range(20, 28), max_tokens=4, priority=1)
    urgent.token_ids += generated(giver)
    urgent.num_computed_tokens, urgent.block_table = 8, bench.pool.match(giver.block_hashes)
    bench.scheduler.release(giver)
    usual = make_sequence("usual", range(7), max_tokens=6)
    bench.scheduler.add(usual)
    bench.step()
    bench.scheduler.add(urgent)
    bench.run()
    assert generated(usual) == continuation(range(7), 6)
    assert generated(urgent) == continuation(range(20, 28), 4)


def test_who_was_handed_over_to_a_full_batch_is_reported_with_its_tokens() -> None:
    bench = Bench(max_batch=1)
    bench.scheduler.add(make_sequence("a", range(8), max_tokens=4))
    bench.step()
    later = make_sequence("b", range(20, 29), max_tokens=4)
    later.num_computed_tokens, later.block_table = 8, bench.pool.allocate(2)
    later.had_token(0.0)
    bench.scheduler.add(later)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert (bench.scheduler.num_decoding, bench.scheduler.num_context_tokens) == (2, 9 + 8)


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_end_with_every_token_right(seed: int) -> None:
    """Arrivals, cancellations, shared prefixes and blocks held elsewhere, in too small a pool."""
    rng = random.Random(seed)
    num_blocks = rng.randint(6, 20)
    num_slots = rng.choice([0, 2, 5, 30])
    bench = Bench(num_blocks, rng.randint(1, 12), max_batch=rng.randint(1, 5), num_slots=num_slots)
    unfinished: dict[str, Sequence] = {}
    held: list[int] = []
    for number in range(250):
        action = rng.random()
        if action < 0.25:
            prompt = [*range(rng.choice([0, 4, 9])), *(rng.randrange(3) for _ in range(rng.randint(1, 8)))]
            sequence = make_sequence(
                f"r{number}",
                prompt,
                max_tokens=rng.randint(1, 7),
                priority=rng.randint(0, 1),
                arrived_at_s=float(number),
            )
            bench.scheduler.add(sequence)
            unfinished[sequence.request_id] = sequence
        elif action < 0.3 and unfinished:
            bench.scheduler.release(unfinished.pop(rng.choice(list(unfinished))))
        elif action < 0.4:
            bench.pool.release(held)
            held = []
        elif action < 0.45 and bench.pool.num_available - bench.pool.num_promised > 2:
            held += bench.pool.allocate_spare(rng.randint(1, 2))
        else:
            finish_step(bench, unfinished)
    bench.pool.release(held)
    while unfinished:
        assert finish_step(bench, unfinished), "somebody always advances"
    assert bench.pool.num_held == 0
    bench.swap_space.check([])


def finish_step(bench: Bench, unfinished: dict[str, Sequence]) -> bool:
    outputs = bench.step()
    for output in outputs or ():
        sequence = output.sequence
        if output.finish_reason is not None:
            expected = continuation(
                sequence.token_ids[: sequence.num_prompt_tokens], sequence.stop.max_tokens
            )
            assert generated(sequence) == expected
            bench.scheduler.release(unfinished.pop(sequence.request_id))
    return outputs is not None
