"""Engine loop: where the event loop meets the thread that owns the device.

The event loop owns the block pool, the scheduler and every sequence. One dedicated
thread runs steps; all that crosses is a plan, which is a frozen value, and its result.
There is no lock and no queue: a step is one awaited call.

    schedule (event loop) -> execute (device thread) -> commit, tell listeners (event loop)

A step that raises ends its sequences with `FinishReason.ERROR` and nobody else's: the
sequences of other steps go on. What raised is logged and counted, because the owner of
a sequence is told only that it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from base.errors import ServeError
from base.logs import event
from base.request import FinishReason
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import SequenceOutput, StepPlan, StepResult

log = logging.getLogger(__name__)

Listener = Callable[[SequenceOutput], None]


class StepRunner(Protocol):
    """What runs a step, on the device thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and sample; may raise anything."""
        ...


class EngineLoop:
    """Owns one engine's pool, scheduler and device thread. Belongs to the event loop."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, pool: BlockPool) -> None:
        self._runner = runner
        self.scheduler = scheduler
        self.pool = pool
        self._listeners: dict[Sequence, Listener] = {}
        self._in_flight: set[Sequence] = set()
        self._released: list[Sequence] = []
        self._changed = asyncio.Event()
        self.num_steps = 0
        self.num_failed_steps = 0
        # Whoever releases blocks, in here or not, may have made room for who waits.
        pool.on_release(self._changed.set)

    def add(self, sequence: Sequence, listener: Listener) -> None:
        """Run `sequence`; call `listener` on the event loop for each step that it was in.

        The listener is called until an output has a finish reason, or `release`. After
        that the sequence still has its blocks, until `release`.

        Raises:
            InvalidRequestError, CapacityError: as `Scheduler.add`; nothing was taken.
        """
        self.scheduler.add(sequence)
        self._listeners[sequence] = listener
        self._changed.set()

    def release(self, sequence: Sequence) -> None:
        """End `sequence`, whatever its state, and give its blocks back. Again: no effect.

        Its listener is not called any more. Blocks that the step in flight writes to
        come back to the pool when that step ends.
        """
        self._listeners.pop(sequence, None)
        if sequence in self._in_flight:
            self._released.append(sequence)
        else:
            self.scheduler.release(sequence)

    async def run(self) -> None:
        """Run steps until cancelled. Then the step in flight is waited for: memory that it
        writes to may be unmapped once this has returned."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="device") as thread:
            while True:
                plan = self.scheduler.schedule()
                if plan is None:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                await self._step(thread, plan)

    async def _step(self, thread: ThreadPoolExecutor, plan: StepPlan) -> None:
        self._in_flight = {entry.sequence for entry in plan.entries}
        done = asyncio.get_running_loop().run_in_executor(thread, self._runner.execute, plan)
        try:
            result = await _finished(done)
        except Exception as error:
            outputs = self._failed(plan, error)
        else:
            outputs = self.scheduler.commit(plan, result)
        finally:
            self._in_flight = set()
            for sequence in self._released:
                self.scheduler.release(sequence)
            self._released.clear()
        self.num_steps += 1
        for output in outputs:
            self._tell(output)

    def _failed(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        self.num_failed_steps += 1
        level = logging.WARNING if isinstance(error, ServeError) else logging.ERROR
        names = ",".join(entry.sequence.request_id for entry in plan.entries)
        event(log, "step failed", level, requests=names, error=f"{type(error).__name__}: {error}")
        log.debug("step failed", exc_info=error)
        for entry in plan.entries:
            self.scheduler.finish(entry.sequence, FinishReason.ERROR)
        return [SequenceOutput(entry.sequence, (), FinishReason.ERROR) for entry in plan.entries]

    def _tell(self, output: SequenceOutput) -> None:
        if output.finish_reason is None:
            listener = self._listeners.get(output.sequence)
        else:
            listener = self._listeners.pop(output.sequence, None)
        if listener is not None:
            listener(output)


async def _finished(done: asyncio.Future[StepResult]) -> StepResult:
    """Await a step that cannot be interrupted; a cancellation takes effect when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return done.result()
