"""The engine loop: steps on one thread, listeners on the event loop, nothing lost."""

import asyncio
import random
import threading
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from base.clock import SystemClock
from base.errors import CapacityError
from base.request import FinishReason, StopParams
from base.step_budget import UNBOUNDED_GAPS, GapBounds
from base.step_cost import StepCost
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.runner import StepRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import SequenceOutput, StepPlan, StepResult
from engine.swap_space import Swap, SwapSpace
from tests.engine.builders import make_sequence, run_sequences
from tests.engine.fakes import FakeDevice, LaunchingFakeDevice, continuation

NUM_BLOCKS = 16
BLOCK_SIZE = 4
STEP_COST = StepCost(1e-3, 1e-7, 0.01, 1e-4, 1e-6, chunk_step_s=0.004)
GAP_BOUNDS = (
    UNBOUNDED_GAPS,
    GapBounds(1e-6),
    GapBounds(0.01),
    GapBounds(0.5, 0.02),
    GapBounds(longest_s=1e-5),
    GapBounds(longest_s=0.011),
)


class GatedDevice(StepRunner):
    """Runs a step only when the test lets it; fails steps that hold a poisoned sequence."""

    def __init__(self, poison: str = "") -> None:
        self._device = FakeDevice(NUM_BLOCKS, BLOCK_SIZE)
        self._poison = poison
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.threads: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.open.wait(timeout=60)
        if any(entry.sequence.request_id == self._poison for entry in plan.entries):
            raise ValueError("poison")
        return self._device.execute(plan)


def make_loop(device: StepRunner, max_batch: int = 4) -> EngineLoop:
    pool = BlockPool(NUM_BLOCKS)
    return EngineLoop(
        device, Scheduler(pool, BLOCK_SIZE, 8, max_batch, max_model_len=200), pool, SystemClock()
    )


@asynccontextmanager
async def running(loop: EngineLoop):
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.pool.check()


async def entered(device: GatedDevice) -> None:
    await asyncio.to_thread(device.entered.acquire, timeout=60)


class Collected:
    """A listener that can be waited for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._reason: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()

    def __call__(self, output: SequenceOutput) -> None:
        self.tokens += [token.token_id for token in output.tokens]
        if output.finish_reason is not None:
            self._reason.set_result(output.finish_reason)

    async def ended(self) -> FinishReason:
        return await asyncio.wait_for(self._reason, 60)


async def test_tokens_reach_the_listener_in_order() -> None:
    device = GatedDevice()
    loop = make_loop(device)
    async with running(loop):
        sequences = [make_sequence(name, range(start, start + 7), 5) for name, start in (("a", 0), ("b", 30))]
        heard = [Collected() for _ in sequences]
        for sequence, listener in zip(sequences, heard, strict=True):
            loop.add(sequence, listener)
        for sequence, listener in zip(sequences, heard, strict=True):
            assert await listener.ended() is FinishReason.LENGTH
            assert listener.tokens == continuation(sequence.token_ids[:7], 5)
            loop.release(sequence)
    assert loop.pool.num_held == 0
    assert device.threads != {threading.get_ident()}
    assert len(device.threads) == 1


async def test_a_sequence_added_while_idle_wakes_the_loop() -> None:
    loop = make_loop(GatedDevice())
    async with running(loop):
        for name in "ab":
            heard = Collected()
            sequence = make_sequence(name, range(3), 2)
            loop.add(sequence, heard)
            assert await heard.ended() is FinishReason.LENGTH
            assert heard.tokens == continuation(sequence.token_ids[:3], 2)
            loop.release(sequence)


async def test_what_a_sequence_computed_itself_before_it_was_preempted_was_not_cached() -> None:
    loop = make_loop(GatedDevice())
    sequences = [make_sequence(name, range(ord(name), ord(name) + 8), 20) for name in "adgj"]
    await run_sequences(loop, sequences)
    assert loop.scheduler.num_preemptions
    assert [sequence.num_matched_tokens for sequence in sequences] == [0] * 4


async def test_blocks_released_by_somebody_else_wake_the_loop() -> None:
    loop = make_loop(GatedDevice())
    reserved = loop.pool.allocate(NUM_BLOCKS)
    async with running(loop):
        heard = Collected()
        sequence = make_sequence("a", range(3), 1)
        loop.add(sequence, heard)
        await asyncio.sleep(0)
        loop.pool.release(reserved)
        assert await heard.ended() is FinishReason.LENGTH
        loop.release(sequence)


async def test_a_refused_sequence_takes_nothing() -> None:
    loop = make_loop(GatedDevice())
    with pytest.raises(CapacityError):
        loop.add(make_sequence("a", range(60), 60), Collected())
    assert loop.scheduler.schedule() is None


async def test_release_in_a_step_gives_the_blocks_back_when_the_step_ends() -> None:
    device = GatedDevice()
    loop = make_loop(device)
    device.open.clear()
    async with running(loop):
        gone, stays = make_sequence("gone", range(4), 9), make_sequence("stays", range(9, 12), 2)
        heard_gone, heard_stays = Collected(), Collected()
        loop.add(gone, heard_gone)
        loop.add(stays, heard_stays)
        await entered(device)
        loop.release(gone)
        loop.release(gone)
        assert loop.pool.num_held == 2, "the device still writes to them"
        device.open.set()
        await heard_stays.ended()
        assert heard_gone.tokens == []
        assert loop.pool.num_held == 1
        loop.release(stays)
        assert loop.pool.num_held == 0


async def test_release_outside_a_step_gives_the_blocks_back_at_once() -> None:
    loop = make_loop(GatedDevice())
    async with running(loop):
        heard = Collected()
        sequence = make_sequence("a", range(4), 1)
        loop.add(sequence, heard)
        await heard.ended()
        assert loop.pool.num_held == 1
        loop.release(sequence)
        loop.release(sequence)
        assert loop.pool.num_held == 0


async def test_a_step_that_raises_ends_its_sequences_and_nobody_elses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = GatedDevice(poison="bad")
    loop = make_loop(device, max_batch=1)
    async with running(loop):
        sequences = {name: make_sequence(name, range(4), 3) for name in ("a", "bad", "z")}
        heard = {name: Collected() for name in sequences}
        for name, sequence in sequences.items():
            loop.add(sequence, heard[name])
        assert await heard["bad"].ended() is FinishReason.ERROR
        assert num_failed_steps(caplog) == 1
        for name in ("a", "z"):
            assert await heard[name].ended() is FinishReason.LENGTH
            assert heard[name].tokens == continuation(range(4), 3)
        for sequence in sequences.values():
            loop.release(sequence)
    assert loop.pool.num_held == 0


def num_failed_steps(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.getMessage().startswith("step failed") for record in caplog.records)


class RaisingDevice(FakeDevice):
    """Its first step raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self._errors = [error]

    def execute(self, plan: StepPlan) -> StepResult:
        if self._errors:
            raise self._errors.pop()
        return super().execute(plan)


@pytest.mark.parametrize(
    "error", [KeyError("k"), StopIteration(), asyncio.CancelledError(), CancelledError()], ids=range(4)
)
async def test_whatever_a_step_raises_nobody_waits_for_it(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A future takes no StopIteration, and a cancelled one would end the loop as if that were wanted."""
    loop = make_loop(RaisingDevice(error))
    async with running(loop) as task:
        heard = {name: Collected() for name in ("lost", "next")}
        for name, reason in (("lost", FinishReason.ERROR), ("next", FinishReason.LENGTH)):
            sequence = make_sequence(name, range(4), 3)
            loop.add(sequence, heard[name])
            assert await heard[name].ended() is reason
            loop.release(sequence)
        assert not task.done()
    assert num_failed_steps(caplog) == 1
    assert loop.pool.num_held == 0


class UnableDevice(FakeDevice):
    """Cannot be made ready."""

    def begin(self) -> None:
        raise StopIteration


async def test_a_runner_that_cannot_begin_ends_the_loop() -> None:
    """A future takes no StopIteration: whoever waited for one would wait for ever."""
    with pytest.raises(RuntimeError, match="as it began"):
        await asyncio.wait_for(make_loop(UnableDevice(NUM_BLOCKS, BLOCK_SIZE)).run(), 60)


class BeginningDevice(GatedDevice):
    """Has to be made ready, which takes until the test lets it."""

    def begin(self) -> None:
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.open.wait(timeout=60)


async def test_what_a_device_begins_with_is_done_on_its_thread_before_the_first_step() -> None:
    device = BeginningDevice()
    device.open.clear()
    loop = make_loop(device)
    listener = Collected()
    sequence = make_sequence("a", range(4), 3)
    loop.add(sequence, listener)
    async with running(loop):
        await entered(device)
        assert not loop.has_begun.is_set()
        assert loop.num_steps == 0
        device.open.set()
        assert await listener.ended() is FinishReason.LENGTH
        assert loop.has_begun.is_set()
        loop.release(sequence)
    assert len(device.threads) == 1
    assert threading.get_ident() not in device.threads


async def test_cancelling_waits_for_what_a_device_begins_with() -> None:
    device = BeginningDevice()
    device.open.clear()
    task = asyncio.create_task(make_loop(device).run())
    await entered(device)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    device.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_waits_for_the_step_in_flight() -> None:
    device = GatedDevice()
    loop = make_loop(device)
    device.open.clear()
    sequence = make_sequence("a", range(4), 3)
    loop.add(sequence, Collected())
    task = asyncio.create_task(loop.run())
    await entered(device)
    loop.release(sequence)
    task.cancel()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    assert loop.pool.num_held == 1
    device.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert loop.pool.num_held == 0


def released_at_its_end(loop: EngineLoop, heard: Collected):
    """A sequence that ended and keeps its blocks can keep others from ending."""

    def listen(output: SequenceOutput) -> None:
        heard(output)
        if output.finish_reason is not None:
            loop.release(output.sequence)

    return listen


@pytest.mark.parametrize("device_type", [FakeDevice, LaunchingFakeDevice])
@pytest.mark.parametrize("seed", range(15))
async def test_random_histories_give_every_listener_its_tokens(
    device_type, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Stop tokens, lengths, cancellations and preemption, whether steps are launched ahead or not."""
    rng = random.Random(seed)
    loop = make_loop(device_type(NUM_BLOCKS, BLOCK_SIZE), max_batch=rng.randint(2, 5))
    finished = []
    async with running(loop):
        for number in range(12):
            prompt = [*range(rng.choice([0, 5, 9])), *(rng.randrange(4) for _ in range(rng.randint(1, 9)))]
            count = rng.randint(1, 25)
            expected = continuation(prompt, count)
            stop = StopParams(count, stop_token_ids=(rng.choice(expected),))
            expected = expected[: expected.index(stop.stop_token_ids[0]) + 1]
            sequence, heard = make_sequence(f"r{number:02}", prompt, stop=stop), Collected()
            loop.add(sequence, released_at_its_end(loop, heard))
            finished.append((sequence, heard, expected))
            if rng.random() < 0.3:
                loop.release(finished.pop(rng.randrange(len(finished)))[0])
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
        for sequence, heard, expected in finished:
            await heard.ended()
            assert heard.tokens == expected, sequence.request_id
        assert num_failed_steps(caplog) == 0
    assert loop.pool.num_held == 0


@pytest.mark.parametrize("seed", range(10))
async def test_prompts_that_begin_ahead_give_every_listener_its_tokens(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts that share prefixes, of several ranks and bounds, in few blocks; some go to host memory."""
    rng = random.Random(seed)
    num_blocks = rng.choice([14, 20, 100])
    pool, swap_space = BlockPool(num_blocks), SwapSpace(8, 0.001)
    chunk_tokens, max_batch = rng.choice([6, 16, 64]), rng.randint(1, 6)
    scheduler = Scheduler(pool, BLOCK_SIZE, chunk_tokens, max_batch, 200, swap_space=swap_space)
    scheduler.step_cost = rng.choice([None, STEP_COST])
    loop = EngineLoop(LaunchingFakeDevice(num_blocks, BLOCK_SIZE), scheduler, pool, SystemClock())
    finished = []
    async with running(loop):
        for number in range(16):
            prompt = [
                *range(rng.choice([0, 5, 9, 20])),
                *(rng.randrange(3) for _ in range(rng.randint(1, 7))),
            ]
            count = rng.randint(1, 24)
            expected = continuation(prompt, count)
            stop = StopParams(count, stop_token_ids=(rng.choice(expected),))
            expected = expected[: expected.index(stop.stop_token_ids[0]) + 1]
            sequence, heard = make_sequence(f"r{number:02}", prompt, stop=stop), Collected()
            sequence.priority, sequence.gap_bounds = rng.randrange(2), rng.choice(GAP_BOUNDS)
            loop.add(sequence, released_at_its_end(loop, heard))
            finished.append((sequence, heard, expected))
            if rng.random() < 0.2:
                loop.release(finished.pop(rng.randrange(len(finished)))[0])
            for _ in range(rng.choice([0, 1, 3, 12])):
                await asyncio.sleep(0)
        for sequence, heard, expected in finished:
            await heard.ended()
            assert heard.tokens == expected, sequence.request_id
        assert num_failed_steps(caplog) == 0
    assert pool.num_held == 0


async def computed(loop: EngineLoop, name: str, prompt: list[int], max_tokens: int) -> Sequence:
    """Return a sequence that has its first token and the KV of its prompt, as from another node."""
    prefill, heard = make_sequence(f"{name}.prefill", prompt, 1), Collected()
    loop.add(prefill, heard)
    await heard.ended()
    sequence = make_sequence(name, prompt, max_tokens)
    sequence.token_ids += heard.tokens
    sequence.num_computed_tokens = len(prompt)
    sequence.block_table += prefill.block_table
    loop.pool.hold(sequence.block_table)
    loop.release(prefill)
    return sequence


@pytest.mark.parametrize("seed", range(15))
async def test_who_comes_with_its_kv_gets_its_tokens_in_random_histories(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    num_blocks = 8 * NUM_BLOCKS
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, BLOCK_SIZE, 8, rng.randint(1, 6), max_model_len=200)
    loop = EngineLoop(LaunchingFakeDevice(num_blocks, BLOCK_SIZE), scheduler, pool, SystemClock())
    async with running(loop):
        coming = []
        for number in range(24):
            prompt = [number, *(rng.randrange(4) for _ in range(rng.randint(1, 11)))]
            coming.append(await computed(loop, f"r{number:02}", prompt, rng.randint(2, 9)))
        expected: dict[Sequence, list[int]] = {}
        heard = {sequence: Collected() for sequence in coming}
        for number, sequence in enumerate(coming):
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            expected[sequence] = continuation(prompt, sequence.stop.max_tokens)[1:]
            loop.add(sequence, released_at_its_end(loop, heard[sequence]))
            if rng.random() < 0.1:
                beside = make_sequence(f"beside{number}", range(50, 59), 2)
                heard[beside], expected[beside] = Collected(), continuation(range(50, 59), 2)
                loop.add(beside, released_at_its_end(loop, heard[beside]))
            for _ in range(rng.choice([0, 1, 3, 12])):
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                loop.release(sequence)
                del expected[sequence]
        for sequence, tokens in expected.items():
            await heard[sequence].ended()
            assert heard[sequence].tokens == tokens, sequence.request_id
        assert num_failed_steps(caplog) == 0
    assert pool.num_held == 0


class MovingScheduler(Scheduler):
    """Plans moves of no block beside every prompt of an odd number of tokens."""

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        plan = super().schedule(now_s)
        if plan is None or not plan.entries[0].num_tokens % 2:
            return plan
        return replace(plan, swaps=(Swap(plan.entries[0].sequence, (), (), is_out=False),))


async def test_a_launch_is_not_told_of_where_blocks_move_in():
    pool = BlockPool(NUM_BLOCKS)
    scheduler = MovingScheduler(pool, BLOCK_SIZE, 8, 4, max_model_len=200)
    loop, told = EngineLoop(FakeDevice(NUM_BLOCKS, BLOCK_SIZE), scheduler, pool, SystemClock()), []
    async with running(loop):
        for num_tokens in (4, 5):
            collected = Collected()
            sequence = make_sequence(str(num_tokens), range(num_tokens), 1)
            loop.add(sequence, collected, lambda chunk: told.append(chunk.entry.num_tokens))
            await collected.ended()
            loop.release(sequence)
    assert told == [4]
