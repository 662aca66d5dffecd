"""Preempted sequences whose KV moves to host memory: what comes back is what left, and nothing is lost."""

import asyncio
import copy

import pytest
import torch

from base.clock import SystemClock
from base.config import GIB, EngineConfig
from base.kv_layout import head_layout
from base.request import FinishReason
from base.step_budget import GapBounds
from base.step_cost import StepCost
from engine.build import assemble_engine
from engine.model import PagedModel
from engine.paged_cache import PagedCache
from engine.scaled_kv import scaled_layout
from engine.sequence import Sequence
from engine.swap_space import HostBlocks, Swap
from tests.engine.builders import make_sequence, run_sequences
from tests.engine.fakes import continuation
from tests.engine.scheduler_bench import Bench, generated
from tests.engine.test_gpu_model import make_family
from tests.kinds_of_kv import KINDS


def two_that_do_not_fit(bench: Bench) -> tuple[Sequence, Sequence]:
    """Sequences of which the second, younger one has to give way, 16 computed tokens long."""
    old = make_sequence("old", range(16), max_tokens=10, arrived_at_s=1.0)
    young = make_sequence("young", range(50, 65), max_tokens=9, arrived_at_s=2.0)
    for sequence in (old, young):
        bench.scheduler.add(sequence)
    return old, young


def until_preempted(bench: Bench) -> None:
    while bench.scheduler.num_preemptions == 0:
        assert bench.step() is not None


def num_computed_twice(bench: Bench, sequence: Sequence) -> int:
    starts = [
        entry.start + offset
        for plan in bench.device.plans
        for entry in plan.entries
        if entry.sequence is sequence
        for offset in range(entry.num_tokens)
    ]
    return len(starts) - len(set(starts))


def test_what_moves_to_host_memory_is_not_computed_again() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9)
    old, young = two_that_do_not_fit(bench)
    until_preempted(bench)
    assert young.swapped is not None
    bench.run()
    assert generated(old) == continuation(range(16), 10)
    assert generated(young) == continuation(range(50, 65), 9)
    assert bench.scheduler.num_swaps >= 1
    assert num_computed_twice(bench, young) == 0
    bench.swap_space.check([])
    assert bench.pool.num_held == 0


def test_blocks_that_move_out_come_free_when_their_step_has_landed_and_not_before() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9)
    two_that_do_not_fit(bench)
    plan = None
    while plan is None or not plan.swaps:
        if plan is not None:
            bench.scheduler.commit(plan, bench.device.execute(plan))
        plan = bench.scheduler.schedule()
    leaving = plan.swaps[0].blocks
    assert bench.pool.num_available + len(leaving) <= 9
    bench.pool.hold(leaving)  # which asserts that somebody holds them, or that they have content
    bench.pool.release(leaving)
    before = bench.pool.num_available
    bench.scheduler.commit(plan, bench.device.execute(plan))
    assert bench.pool.num_available == before + len(leaving)


@pytest.mark.parametrize(("block_s", "num_swaps"), [(0.9, 0), (0.5, 1)])
def test_whichever_takes_less_time_is_done(block_s: float, num_swaps: int) -> None:
    """Computing 16 tokens took 6 s, so 4 blocks go there and back if each way takes less than 0.75 s."""
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9, block_s=block_s)
    _, young = two_that_do_not_fit(bench)
    bench.step_s = 6.0
    until_preempted(bench)
    assert bench.scheduler.num_swaps == num_swaps
    assert (young.swapped is not None) == bool(num_swaps)


def test_a_chunk_says_what_recomputing_costs_though_a_step_may_have_many_more_tokens() -> None:
    bench = Bench(num_blocks=140, chunk_tokens=8192, max_model_len=600, num_slots=9, block_s=10.0)
    sequence = make_sequence("long", range(512), max_tokens=4)
    bench.scheduler.add(sequence)
    bench.step_s = 6.0
    assert bench.step() is not None
    assert not bench.swap_space.move_out(sequence, 1), "20 s to go there and back"


def test_without_room_in_host_memory_it_is_computed_again() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=3)
    _, young = two_that_do_not_fit(bench)
    until_preempted(bench)
    assert young.swapped is None
    bench.run()
    assert generated(young) == continuation(range(50, 65), 9)
    assert num_computed_twice(bench, young) > 0


def test_a_sequence_released_while_it_is_in_host_memory_gives_its_slots_back() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9)
    old, young = two_that_do_not_fit(bench)
    until_preempted(bench)
    bench.scheduler.release(young)
    bench.swap_space.check([])
    bench.run()
    assert generated(old) == continuation(range(16), 10)
    assert bench.pool.num_held == 0


def test_a_step_that_fails_loses_what_it_moved_and_nobody_reads_it() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9)
    old, young = two_that_do_not_fit(bench)
    plan = bench.scheduler.schedule()
    while not plan.swaps:
        bench.scheduler.commit(plan, bench.device.execute(plan))
        plan = bench.scheduler.schedule()
    ended = bench.scheduler.fail(plan)
    assert {output.finish_reason for output in ended} <= {FinishReason.ERROR}
    for output in ended:
        bench.scheduler.release(output.sequence)
    assert young.swapped is None
    bench.run()
    assert generated(young) == continuation(range(50, 65), 9)
    bench.swap_space.check([])
    assert bench.pool.num_held == 0
    assert old.finish_reason is not None


def test_a_prompt_half_done_and_kv_that_may_be_damaged_are_computed_again() -> None:
    bench = Bench(num_blocks=9, chunk_tokens=16, num_slots=9)
    _, young = two_that_do_not_fit(bench)
    young.is_proven = False
    until_preempted(bench)
    assert young.swapped is None
    half_done = Bench(num_blocks=6, chunk_tokens=4, num_slots=6)
    half_done.scheduler.add(make_sequence("old", range(8), max_tokens=8, arrived_at_s=1.0))
    late = make_sequence("late", range(50, 62), max_tokens=2, arrived_at_s=2.0)
    for _ in range(5):
        half_done.step()
    half_done.scheduler.add(late)
    until_preempted(half_done)
    assert 0 < late.num_tokens == late.num_prompt_tokens
    assert late.swapped is None


def test_what_is_half_done_again_is_never_read_from_where_a_failed_step_was_to_move_it() -> None:
    """Where a step has no tokens for who comes back, only the move would be in it."""
    bench = Bench(num_blocks=9, chunk_tokens=8, num_slots=9)
    bound = GapBounds(longest_s=0.011)  # an empty step keeps it, and nothing beside it would
    old = make_sequence("old", range(7), max_tokens=20, arrived_at_s=1.0, gap_bounds=bound)
    again = make_sequence("again", range(50, 54), max_tokens=16, arrived_at_s=2.0)
    again.token_ids += continuation(range(50, 54), 12)
    bench.scheduler.add(old)
    while old.num_computed_tokens < 11:
        bench.step()
    reserved = bench.pool.allocate(bench.pool.num_available - 4)
    bench.scheduler.add(again)
    until_preempted(bench)
    bench.pool.release(reserved)
    bench.pool.release(bench.pool.allocate(bench.pool.num_available))
    bench.scheduler.step_cost = StepCost(1e-3, 1e-7, 0.01, 1e-4, 1e-6, chunk_step_s=0.004)
    plan = bench.scheduler.schedule()
    assert again not in [entry.sequence for entry in plan.entries]
    for output in bench.scheduler.fail(plan):
        bench.scheduler.release(output.sequence)
    bench.run()
    assert generated(again) == continuation(range(50, 54), 16)


def test_what_is_still_cached_does_not_move_back() -> None:
    """The young one's first blocks were not evicted when it runs again."""
    bench = Bench(num_blocks=12, chunk_tokens=16, num_slots=12)
    held = bench.pool.allocate(3)
    two_that_do_not_fit(bench)
    until_preempted(bench)
    bench.pool.release(held)
    bench.run()
    moved_in = [swap for plan in bench.device.plans for swap in plan.swaps if not swap.is_out]
    moved_out = [swap for plan in bench.device.plans for swap in plan.swaps if swap.is_out]
    assert len(moved_in) == len(moved_out) == 1
    assert len(moved_in[0].blocks) < len(moved_out[0].slots)
    bench.swap_space.check([])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def test_bytes_that_moved_out_and_in_elsewhere_are_the_same(device: str) -> None:
    layout = head_layout(2, 2, 8, 16, "float32")
    cache = PagedCache(layout, 6, torch.device(device))
    cache.heads().copy_(torch.randn(cache.heads().shape))
    expected = cache.heads()[[4, 1]].clone()
    host = HostBlocks(cache, 3)
    assert host.measure(SystemClock()) > 0.0
    sequence = make_sequence("a", range(20))
    host.move([Swap(sequence, (4, 1, 5), (2, 0), is_out=True)])
    cache.heads().zero_()
    host.move([Swap(sequence, (3, 5), (2, 0), is_out=False)])
    assert torch.equal(cache.heads()[[3, 5]], expected)
    assert not cache.heads()[[0, 1, 2, 4]].any()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # a GPU's: all is of float32 here
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # of a router's experts
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def test_a_model_goes_on_from_what_was_in_host_memory_as_if_nothing_had_been(device: str, kind: str) -> None:
    family, kv_dtype = KINDS[kind]
    model = make_family(family).to(device)
    layout = PagedModel(model).shape
    if kv_dtype == "fp8":
        layout = scaled_layout(layout)

    def answers(num_blocks: int) -> tuple[dict[str, list[int]], int]:
        gib = num_blocks * layout.block_bytes / GIB
        config = EngineConfig(
            device, "float32", 16, gib, swap_gib=gib, chunk_tokens=48, max_batch=8, kv_dtype=kv_dtype
        )
        engine = assemble_engine(config, PagedModel(copy.deepcopy(model)), SystemClock())
        sequences = [make_sequence(f"{i}", range(i, i + 40), 60, arrived_at_s=float(i)) for i in range(6)]
        results = asyncio.run(run_sequences(engine.loop, sequences))
        tokens = {name: [token.token_id for token in items] for name, items in results.items()}
        return tokens, engine.scheduler.num_swaps

    undisturbed, none = answers(100)
    disturbed, some = answers(24)
    assert none == 0
    assert some > 0
    assert disturbed == undisturbed
