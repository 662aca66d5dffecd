"""The engine loop, in virtual time: when the step after the one under way is planned."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from base.clock import Busy
from base.request import FinishReason
from base.step_cost import LAUNCH_S, LAUNCH_SHARE
from bench.timed_node import DeviceThread, TimedDevice
from bench.virtual_loop import VirtualLoop, run
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import LaunchedStep, SequenceOutput, StepPlan
from engine.swap_space import SwapSpace
from tests.engine.builders import make_sequence

T = TypeVar("T")
STEP_S = 0.02
COST = CostModel(replace(load_profile("h200-llama8b"), launches_ahead=True, decode_fixed_s=STEP_S))
PLANNED_S = STEP_S * (1 - LAUNCH_SHARE) - LAUNCH_S


def decoding_s(came_after_s: float, predicts: bool, slower: float = 1.0) -> tuple[list[float], float]:
    """Return when a sequence had its tokens, and when a prompt that came beside it had its first.

    Args:
        came_after_s: The seconds from the beginning of a step to the prompt.
        predicts: Whether the engine has a profile.
        slower: Real seconds of a step over predicted ones.
    """

    async def scenario(clock: VirtualLoop) -> tuple[list[float], float]:
        pool, scheduled = BlockPool(1_000), COST.step
        fixed_s = COST.profile.decode_fixed_s * slower
        device = TimedDevice(CostModel(replace(COST.profile, decode_fixed_s=fixed_s)), clock)
        scheduler = Scheduler(pool, 16, 512, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, clock, partial(DeviceThread, device))
        loop.predict_steps(scheduled if predicts else None)
        heard: dict[Sequence, list[float]] = {}
        changed = asyncio.Event()

        def listen(output: SequenceOutput) -> None:
            heard[output.sequence].append(clock.now_s())
            changed.set()

        def add(name: str, max_tokens: int) -> Sequence:
            sequence = make_sequence(name, [len(name)] * 40, max_tokens)
            heard[sequence] = []
            loop.add(sequence, listen)
            return sequence

        task = asyncio.create_task(loop.run())
        decoding = add("decoding", 60)
        while len(heard[decoding]) < 40:
            changed.clear()
            await changed.wait()
        began_s, joins = clock.now_s(), asyncio.Event()
        clock.call_at(began_s + came_after_s, joins.set)
        await joins.wait()
        joining = add("joining", 1)
        while not heard[joining] or len(heard[decoding]) < 60:
            changed.clear()
            await changed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [at_s - began_s for at_s in heard[decoding]], heard[joining][0] - began_s

    return run(scenario)


@pytest.mark.parametrize(
    ("came_after_s", "predicts", "step"),
    [
        (0.1 * PLANNED_S, True, 2),
        (0.99 * PLANNED_S, True, 2),
        (1.01 * PLANNED_S, True, 3),
        (0.99 * STEP_S, True, 3),
        (0.1 * PLANNED_S, False, 3),
    ],
)
def test_who_comes_before_the_next_step_is_planned_is_in_it(
    came_after_s: float, predicts: bool, step: int
) -> None:
    decoding, first_s = decoding_s(came_after_s, predicts)
    after = [at_s for at_s in decoding if at_s > 1e-6]
    assert first_s == after[step - 1]


@pytest.mark.parametrize("slower", [0.5, 0.8, 1.0, 1.5])
def test_a_device_whose_steps_are_planned_late_does_not_wait_once_their_pace_is_known(slower: float) -> None:
    decoding, _ = decoding_s(STEP_S / 8, True, slower)
    steps = [later - sooner for sooner, later in pairwise(decoding[39:])]
    assert steps == pytest.approx([slower * STEP_S] * len(steps), rel=0.06)


def test_the_first_steps_of_a_device_that_is_far_quicker_than_its_profile_are_waited_for() -> None:
    decoding, _ = decoding_s(STEP_S / 80, True, 0.1)
    assert decoding[40] - decoding[0] < 1.1 * 40 * 0.1 * STEP_S


@pytest.mark.parametrize(("first", "then"), [(0.25, 1.0), (0.1, 1.0), (1.0, 0.25)])
def test_what_was_learned_of_a_profile_is_not_held_against_the_next_one(first: float, then: float) -> None:
    """`first` and `then` are seconds of a step, as profiles predict them, over real ones."""

    def profile(slower: float) -> CostModel:
        return CostModel(replace(COST.profile, decode_fixed_s=STEP_S * slower))

    async def scenario(clock: VirtualLoop) -> list[float]:
        pool, device = BlockPool(1_000), TimedDevice(COST, clock)
        loop = EngineLoop(
            device, Scheduler(pool, 16, 512, 8, 10_000), pool, clock, partial(DeviceThread, device)
        )
        loop.predict_steps(profile(first).step)
        heard: list[float] = []
        ended = asyncio.Event()

        def listen(output: SequenceOutput) -> None:
            heard.append(clock.now_s())
            if len(heard) == 400:
                loop.predict_steps(profile(then).step)
            if output.finish_reason is not None:
                ended.set()

        task = asyncio.create_task(loop.run())
        loop.add(make_sequence("decoding", [1] * 40, 600), listen)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [later - sooner for sooner, later in pairwise(heard[300:])]

    gaps = run(scenario)
    assert gaps == pytest.approx([STEP_S] * len(gaps), rel=0.06)


class SlowThread(DeviceThread):
    """Takes seconds to launch a step, or one with a prompt, as where that is not captured."""

    def __init__(self, prompt_s: float, other_s: float, device: TimedDevice, name: str) -> None:
        super().__init__(device, name)
        self._prompt_s, self.other_s = prompt_s, other_s
        self._free_at_s = 0.0

    def submit(self, fn: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        loop, outcome = asyncio.get_running_loop(), Future[T]()
        begins_s = max(loop.time(), self._free_at_s)
        if args and isinstance(args[0], StepPlan):
            has_prompt = args[0].has_chunks
            self._free_at_s = begins_s + (self._prompt_s if has_prompt else self.other_s)

        def begin() -> None:
            done = super(SlowThread, self).submit(fn, *args, **more)
            ends_s = max(loop.time(), self._free_at_s) if args else loop.time()
            done.add_done_callback(lambda _: loop.call_at(ends_s, outcome.set_result, done.result()))

        # what is waited for was launched by then
        loop.call_at(begins_s if args else begins_s + 1e-9, begin)
        return outcome


class IdleDevice(TimedDevice):
    """Counts the seconds for which it had nothing to do before each step.

    A step begins when it has been launched."""

    def __init__(self, cost: CostModel, clock: VirtualLoop, launch_s: float) -> None:
        super().__init__(cost, clock)
        self._launch_s = launch_s
        self.idle_s: list[float] = []
        self.begun_at_s: list[float] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        begins_s = self._clock.now_s() + self._launch_s
        self.idle_s.append(max(0.0, begins_s - self._free_at_s))
        self._free_at_s = max(self._free_at_s, begins_s)
        self.begun_at_s.append(self._free_at_s)
        return super().launch(plan)


def idle_s(prompt_s: float, other_s: float, num_prompts: int, begins_launched: bool) -> list[float]:
    """Return the seconds for which a device waited for each of 100 steps or more, of a sequence and prompts.

    Args:
        prompt_s: Seconds that launching a step with a prompt takes.
        other_s: Seconds that launching another one takes.
        begins_launched: Whether a device begins with a step when that is launched, and not while it is.
    """

    async def scenario(clock: VirtualLoop) -> list[float]:
        pool, device = BlockPool(10_000), IdleDevice(COST, clock, other_s if begins_launched else 0.0)
        scheduler = Scheduler(pool, 16, 4096, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, clock, partial(SlowThread, prompt_s, other_s, device))
        loop.predict_steps(COST.step)
        task = asyncio.create_task(loop.run())
        ended = asyncio.Event()
        decoding = make_sequence("decoding", [1] * 40, 150)
        loop.add(decoding, lambda output: ended.set() if output.finish_reason else None)
        for number in range(num_prompts):
            joins = asyncio.Event()
            clock.call_at(0.6 + 0.3 * number, joins.set)
            await joins.wait()
            loop.add(make_sequence(str(number), [number + 2] * 3000, 1), lambda _: None)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return device.idle_s

    return run(scenario)


def test_a_device_does_not_wait_after_a_step_that_took_long_to_launch() -> None:
    waited = idle_s(0.025, 0.0, num_prompts=6, begins_launched=False)
    assert sum(waited) <= 0.025 + 1e-6, "but for the first launch"


def test_a_prompt_that_took_long_to_launch_began_when_the_step_before_it_ended() -> None:
    async def scenario(clock: VirtualLoop) -> tuple[list[float], list[float], float | None]:
        pool, device = BlockPool(10_000), IdleDevice(COST, clock, 0.0)
        scheduler = Scheduler(pool, 16, 4096, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, clock, partial(SlowThread, 0.025, 0.0, device))
        loop.predict_steps(COST.step)
        began_at_s: list[float] = []
        loop.on_step(lambda _, seconds, ended_at_s: began_at_s.append(ended_at_s - seconds))
        task = asyncio.create_task(loop.run())
        ended, joins, prompt = asyncio.Event(), asyncio.Event(), make_sequence("prompt", [2] * 3000, 1)
        loop.add(
            make_sequence("decoding", [1] * 40, 150), lambda output: output.finish_reason and ended.set()
        )
        clock.call_at(0.6, joins.set)
        await joins.wait()
        loop.add(prompt, lambda _: None)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return began_at_s, device.begun_at_s, prompt.started_at_s

    noted_s, begun_at_s, started_at_s = run(scenario)
    assert noted_s[2:] == pytest.approx(begun_at_s[2 : len(noted_s)], abs=2e-3)
    assert min(abs(started_at_s - begun_s) for begun_s in begun_at_s) < 2e-3


class LateThread(SlowThread):
    """Is heard a millisecond late, because whoever listens has other things to do."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        outcome = super().submit(fn, *args, **more)
        if args:
            return outcome  # a launch, which nobody waits for
        loop, heard = asyncio.get_running_loop(), Future[T]()
        outcome.add_done_callback(lambda done: loop.call_later(1e-3, heard.set_result, done.result()))
        return heard


@pytest.mark.parametrize("launch_s", [0.012, 0.035, 0.06])
def test_a_device_does_not_wait_for_a_loop_that_hears_of_steps_late(launch_s: float) -> None:
    async def scenario(clock: VirtualLoop) -> tuple[list[float], float]:
        pool, device = BlockPool(20_000), IdleDevice(COST, clock, 0.0)
        scheduler = Scheduler(pool, 16, 4096, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, clock, partial(LateThread, launch_s, 0.0, device))
        loop.predict_steps(COST.step)
        task = asyncio.create_task(loop.run())
        ended, num_left = asyncio.Event(), 120

        def listen(output: SequenceOutput) -> None:
            nonlocal num_left
            num_left -= output.finish_reason is not None
            if not num_left:
                ended.set()

        for number in range(num_left):
            loop.add(make_sequence(str(number), [number + 2] * 2048, 1), listen)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return device.idle_s, clock.now_s()

    waited, seconds = run(scenario)
    assert len(waited) >= 60
    assert sum(waited[1:]) < 0.02 * seconds


def test_steps_are_planned_sooner_where_launching_takes_longer() -> None:
    waited = idle_s(0.012, 0.012, num_prompts=0, begins_launched=True)
    assert sum(waited[1:60]) > 0.01, "all were launched in time"
    assert sum(waited[60:]) < 0.01 * STEP_S * len(waited[60:])
    assert sum(each > 0 for each in waited[60:]) <= 0.03 * len(waited)


def test_a_host_that_was_slow_for_a_second_plans_late_again_soon() -> None:
    async def scenario(clock: VirtualLoop) -> list[float]:
        pool, device = BlockPool(10_000), TimedDevice(COST, clock)
        threads: list[SlowThread] = []

        def thread(name: str) -> SlowThread:
            threads.append(SlowThread(0.0, 0.0, device, name))
            return threads[-1]

        loop = EngineLoop(device, Scheduler(pool, 16, 4096, 8, 10_000), pool, clock, thread)
        loop.predict_steps(COST.step)
        ended = asyncio.Event()
        num_heard, waited = 0, list[float]()

        def join() -> None:
            came_at_s = clock.now_s()
            sequence = make_sequence(str(num_heard), [num_heard] * 40, 1)
            loop.add(sequence, lambda _: waited.append(clock.now_s() - came_at_s))

        def listen(output: SequenceOutput) -> None:
            nonlocal num_heard
            num_heard += 1
            for each in threads:
                each.other_s = 1.25 * STEP_S if 100 <= num_heard < 150 else 0.0
            if num_heard in (90, 160, 1_150):
                clock.call_later(0.25 * STEP_S, join)
            if output.finish_reason is not None:
                ended.set()

        task = asyncio.create_task(loop.run())
        loop.add(make_sequence("decoding", [1] * 40, 1_160), listen)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return waited

    before_s, soon_after_s, after_s = run(scenario)
    assert before_s < 2 * STEP_S
    assert soon_after_s > 2.5 * STEP_S, "planned at once"
    assert after_s < 2 * STEP_S


class SlowReader:
    """A clock on which time passes between two readings, once it is told so, but for the first of them."""

    READING_S = 5e-6

    def __init__(self, clock: VirtualLoop) -> None:
        self._clock = clock
        self._later_s = 0.0
        self.is_told = False

    def now_s(self) -> float:
        now_s = self._clock.now_s() + self._later_s
        if self.is_told:
            self._later_s = self.READING_S
        return now_s

    def busy(self) -> Busy:
        return self._clock.busy()


class NotingDevice(TimedDevice):
    """Notes when steps are launched."""

    def __init__(self, cost: CostModel, clock: VirtualLoop) -> None:
        super().__init__(cost, clock)
        self.launched_at_s: list[float] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.launched_at_s.append(self._clock.now_s())
        return super().launch(plan)


def launched_at_s(changes_at_s: float | None) -> list[float]:
    """Return when the steps of a sequence that decodes were launched, if a block comes free at a moment."""

    async def scenario(clock: VirtualLoop) -> list[float]:
        pool, device, reader = BlockPool(1_000), NotingDevice(COST, clock), SlowReader(clock)
        scheduler = Scheduler(pool, 16, 512, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, reader, partial(DeviceThread, device))
        loop.predict_steps(COST.step)
        ended = asyncio.Event()

        def change() -> None:
            pool.release(pool.allocate(1))
            reader.is_told = True

        if changes_at_s is not None:
            clock.call_at(changes_at_s, change)
        task = asyncio.create_task(loop.run())
        sequence = make_sequence("decoding", [1] * 40, 60)
        loop.add(sequence, lambda output: ended.set() if output.finish_reason else None)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return device.launched_at_s

    return run(scenario)


def test_a_step_is_planned_though_its_time_comes_while_the_loop_looks_whether_it_has() -> None:
    undisturbed = launched_at_s(None)
    disturbed = launched_at_s(undisturbed[50] - 0.6 * SlowReader.READING_S)
    assert disturbed[49:52] == pytest.approx(undisturbed[49:52], abs=1e-4)


class MovingDevice(IdleDevice):
    """Takes a millisecond for a step that only moves blocks, and notes how long it had nothing to do then."""

    def __init__(self, cost: CostModel, clock: VirtualLoop) -> None:
        super().__init__(cost, clock, launch_s=0.0)
        self.idle_after_moves_s: list[float] = []
        self._only_moved = False

    def launch(self, plan: StepPlan) -> LaunchedStep:
        launched = super().launch(plan)
        if self._only_moved:
            self.idle_after_moves_s.append(self.idle_s[-1])
        self._only_moved = not plan.entries
        return launched

    def _seconds(self, plan: StepPlan) -> float:
        return super()._seconds(plan) if plan.entries else 0.001


def test_a_device_does_not_wait_after_a_step_that_only_moves_blocks() -> None:
    async def scenario(clock: VirtualLoop) -> list[float]:
        pool, device = BlockPool(20), MovingDevice(COST, clock)
        scheduler = Scheduler(pool, 4, 512, 8, 10_000, swap_space=SwapSpace(200, 1e-6))
        loop = EngineLoop(device, scheduler, pool, clock, partial(DeviceThread, device))
        loop.predict_steps(COST.step)
        running, ended = 4, asyncio.Event()

        def listen(output: SequenceOutput) -> None:
            nonlocal running
            if output.finish_reason is not None:
                loop.release(output.sequence)
                running -= 1
                if not running:
                    ended.set()

        task = asyncio.create_task(loop.run())
        for number in range(running):
            loop.add(make_sequence(str(number), [number] * 6, 60), listen)
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return device.idle_after_moves_s

    waited = run(scenario)
    assert len(waited) >= 3
    assert max(waited) < 1e-6


class FailingThread(DeviceThread):
    """Cannot launch the step of a number."""

    def __init__(self, number: int, device: TimedDevice, name: str) -> None:
        super().__init__(device, name)
        self._number = number

    def submit(self, fn: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        self._number -= bool(args)
        outcome = Future[T]()
        try:
            if args and not self._number:
                raise ValueError("there is no memory for it")
            return super().submit(fn, *args, **more)
        except ValueError as error:
            outcome.set_exception(error)
        return outcome


def test_of_a_step_that_cannot_be_launched_its_sequences_know_when_the_one_before_has_ended() -> None:
    async def scenario(clock: VirtualLoop) -> tuple[list[float], list[int]]:
        pool, device = BlockPool(1_000), IdleDevice(COST, clock, 0.0)
        scheduler = Scheduler(pool, 16, 512, 8, 10_000)
        loop = EngineLoop(device, scheduler, pool, clock, partial(FailingThread, 50, device))
        loop.predict_steps(COST.step)
        heard: list[tuple[float, int]] = []
        ended, joined = asyncio.Event(), asyncio.Event()

        def listen(output: SequenceOutput) -> None:
            heard.append((clock.now_s(), len(device.idle_s)))
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.ERROR
                ended.set()

        task = asyncio.create_task(loop.run())
        loop.add(make_sequence("decoding", [1] * 40, 60), listen)
        await ended.wait()
        loop.add(make_sequence("joining", [2] * 40, 1), lambda _: joined.set())
        await joined.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [at_s for at_s, _ in heard], [launched for _, launched in heard]

    at_s, launched = run(scenario)
    assert at_s[-1] - at_s[-2] < 1e-6
    assert launched[-1] == 49, "nothing was to follow it"
