"""The engine loop, in virtual time: when the step after the one under way is planned."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from base.step_cost import LAUNCH_S, LAUNCH_SHARE
from bench.timed_node import DeviceThread, TimedDevice
from bench.virtual_loop import VirtualLoop, run
from conductor.placing.cost_model import CostModel
from conductor.profiles.reader import load_profile
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import SequenceOutput
from tests.engine.builders import make_sequence

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
