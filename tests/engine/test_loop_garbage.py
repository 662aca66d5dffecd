"""The engine loop leaves no step to the garbage collector, whose pauses would be gaps between tokens."""

import asyncio
import gc

from base.clock import SystemClock
from engine.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from tests.engine.builders import make_sequence
from tests.engine.fakes import FakeDevice

STEPS = 100


async def test_steps_that_have_landed_are_nothing_for_the_garbage_collector():
    pool, ended, launched = BlockPool(64), asyncio.Event(), []
    loop = EngineLoop(FakeDevice(64, 4), Scheduler(pool, 4, 8, 4, max_model_len=200), pool, SystemClock())
    task = asyncio.create_task(loop.run())
    gc.collect()
    gc.disable()
    try:
        sequence = make_sequence("decodes", range(7), STEPS)
        loop.add(sequence, lambda output: output.finish_reason and ended.set(), launched.append)
        await asyncio.wait_for(ended.wait(), 60)
        launched.clear()
        assert gc.collect() < STEPS
    finally:
        gc.enable()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
