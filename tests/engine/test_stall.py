"""Blocks that do not come free: who waits for them is given up in time, and nobody before."""

import asyncio

import pytest

from base.request import FinishReason
from engine.block_pool import BlockPool
from engine.loop import GIVEN_S, STALL_S, EngineLoop
from engine.scheduler import Scheduler
from tests.engine.builders import make_sequence
from tests.engine.fakes import FakeDevice
from tests.simulation.loop import InlineExecutor, SimLoop

NUM_BLOCKS = 16
BLOCK_SIZE = 4
SOON = 0.05


class Stalled:
    """An engine in virtual time, all of whose blocks but some are held."""

    def __init__(self, clock, num_free):
        self._clock = clock
        self.pool = BlockPool(NUM_BLOCKS)
        self.held = self.pool.allocate(NUM_BLOCKS - num_free)
        scheduler = Scheduler(self.pool, BLOCK_SIZE, 8, 4, max_model_len=200)
        self.loop = EngineLoop(
            FakeDevice(NUM_BLOCKS, BLOCK_SIZE), scheduler, self.pool, clock, InlineExecutor
        )

    async def ended(self, *sequences):
        """Run sequences; return why each ended, and after how long."""
        now_s, ends = self._clock.now_s(), {}
        all_ended = asyncio.Event()

        def listen(output):
            if output.finish_reason is not None:
                ends[output.sequence] = output.finish_reason, self._clock.now_s() - now_s
                if len(ends) == len(sequences):
                    all_ended.set()

        for sequence in sequences:
            self.loop.add(sequence, listen)
        async with asyncio.timeout(60):
            await all_ended.wait()
        for sequence in sequences:
            self.loop.release(sequence)
        return [ends[sequence] for sequence in sequences]

    async def passes(self, seconds):
        """Return when it is so much later."""
        later = asyncio.Event()
        self._clock.call_later(seconds, later.set)
        await later.wait()

    def give(self, count):
        """Release some of the blocks that are held; return whether any were."""
        given, self.held = self.held[:count], self.held[count:]
        self.pool.release(given)
        return bool(given)


def stalled(scenario, num_free):
    """Return what `scenario` does with an engine of so few free blocks."""

    async def run(clock):
        engine = Stalled(clock, num_free)
        task = asyncio.ensure_future(engine.loop.run())
        try:
            return await scenario(engine)
        finally:
            task.cancel()
            await asyncio.wait([task])
            engine.give(len(engine.held))
            engine.pool.check()
            assert engine.pool.num_held == 0

    loop = SimLoop(lambda: (0.01, True))
    try:
        return loop.run_until_complete(run(loop))
    finally:
        loop.close()


def test_a_sequence_whose_blocks_do_not_come_free_is_ended_and_not_waited_for():
    async def scenario(engine):
        return await engine.ended(make_sequence("large", range(12), 2), make_sequence("small", range(4), 2))

    (large, large_s), (small, _) = stalled(scenario, num_free=2)
    assert (large, small) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert large_s == pytest.approx(STALL_S, abs=SOON)


def test_who_waits_after_one_who_left_waits_as_long_as_anybody():
    async def scenario(engine):
        left = make_sequence("left", range(12), 2)
        engine.loop.add(left, lambda output: None)
        await engine.passes(STALL_S / 2)
        engine.loop.release(left)
        await engine.passes(STALL_S)
        return await engine.ended(make_sequence("next", range(12), 2))

    ((reason, seconds),) = stalled(scenario, num_free=2)
    assert reason is FinishReason.ERROR
    assert seconds == pytest.approx(STALL_S, abs=SOON)


@pytest.mark.parametrize(("num_tokens", "num_given"), [(12, 1), (20, 3), (28, 5)])
def test_as_many_blocks_are_asked_for_as_who_waits_needs(num_tokens, num_given):
    async def scenario(engine):
        held = len(engine.held)
        engine.loop.on_stall(lambda: engine.give(1))
        ((reason, seconds),) = await engine.ended(make_sequence("waits", range(num_tokens), 1))
        return reason, seconds, held - len(engine.held)

    reason, seconds, given = stalled(scenario, num_free=2)
    assert (reason, given) == (FinishReason.LENGTH, num_given)
    assert seconds == pytest.approx(STALL_S + (num_given - 1) * GIVEN_S, abs=SOON)
