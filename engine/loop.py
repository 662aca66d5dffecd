"""Engine loop: where the event loop meets the thread that owns the device.

The event loop owns the block pool, the scheduler and every sequence. One dedicated thread runs steps; all
that crosses is a plan, which is a frozen value, and its result. There is no lock and no queue: a step is one
awaited call.

    schedule (event loop) -> execute (device thread) -> commit, notify listeners (event loop)

A runner that can launch a step without waiting for it never lets the device wait for the event loop between
two steps: the next one is planned and launched before this one ends, prompts in it too, and before its tokens
are known: some milliseconds before by what a profile predicts, and where there is none when this one begins.
Who comes later is in the one after.

    launch n | launch n+1 | resolve n, commit n | launch n+2 | resolve n+1, commit n+1 | ...

A runner that is a pipeline takes as many steps as fill it, each planned from what is known. Their chunks, of
one prompt or of several, follow each other through the stages.

A step that raises ends its own sequences with `FinishReason.ERROR`; those of other steps go on. One that was
launched ahead of its result reads tokens of it and fails too, with all who are in it. The error is logged and
counted here, because the owner of a sequence learns only that it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from base.clock import Clock
from base.errors import InvalidRequestError, ServeError
from base.logs import event
from base.request import FinishReason
from base.step_cost import LAUNCH_S, StepCorrection, StepCost
from base.uninterrupted import uninterrupted
from engine.block_pool import BlockPool
from engine.runner import StepRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step import LaunchedChunk, LaunchedStep, SequenceOutput, StepPlan, StepResult
from engine.token_masks import Grammars, no_vocabulary

log = logging.getLogger(__name__)

Listener = Callable[[SequenceOutput], None]
LaunchListener = Callable[[LaunchedChunk], None]
StepObserver = Callable[[StepPlan, float, float], None]

LATE = 1.25
IN_TIME = LATE**-0.01
"""Factors of the time for planning and launching: by them one launch in a hundred is late, or that time is
LAUNCH_S."""

SOON_S = 1e-6
"""Seconds that are not waited for."""

STALL_S = 2.0
"""Longest wait of a sequence for blocks while nothing else goes on.

What holds them is then most likely a reservation, whose prefill may wait for blocks itself: for these."""

GIVEN_S = 0.1
"""Seconds for blocks of one who was given up to come, before the next is, if they were not enough."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that was handed to the device thread and not committed yet."""

    plan: StepPlan
    sequences: frozenset[Sequence]
    launched: Future[LaunchedStep]
    launched_at_s: float
    landing: asyncio.Future[StepResult] | None = None
    """The result, once it is waited for."""
    was_over: bool = False
    """Whether it had ended before a thread waited for it."""
    next_planned_at_s: float | None = None
    """When the step after it is planned, once nothing is under way before it."""
    left_s: float = 0.0
    """Seconds until then, as they were when that was last asked; 0: it was time."""

    @property
    def has_failed(self) -> bool:
        """Whether it could not be launched."""
        launched = self.launched
        return launched.done() and not launched.cancelled() and launched.exception() is not None

    def wait(self) -> StepResult:
        """Return its result when it has ended; runs on the device thread."""
        try:
            launched = self.launched.result()
            self.was_over = launched.is_over()
            return launched.resolve()
        except (StopIteration, asyncio.CancelledError, CancelledError) as error:
            # No future of asyncio takes the first; the others in one say that nobody waits for it.
            raise RuntimeError(f"a step ended with {type(error).__name__}") from error

    def begins(self, now_s: float) -> None:
        """Note that the device begins with it."""
        for sequence in self.sequences:
            if sequence.started_at_s is None:
                sequence.started_at_s = now_s


def one_thread(name: str) -> Executor:
    """Return a thread of that name, which owns a device or waits for it."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)


class EngineLoop:
    """Owns one engine's pool, scheduler and device thread. Belongs to the event loop."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        pool: BlockPool,
        clock: Clock,
        thread: Callable[[str], Executor] = one_thread,
        grammars: Grammars | None = None,
    ) -> None:
        """Begin; without `grammars`, every one is refused."""
        self._runner = runner
        self.prefix_parts = runner.prefix_parts
        self._clock = clock
        self._thread = thread
        self.scheduler = scheduler
        self.pool = pool
        self.grammars = grammars or Grammars(no_vocabulary)
        self._listeners: dict[Sequence, Listener] = {}
        self._launch_listeners: dict[Sequence, LaunchListener] = {}
        self._flights: list[_Flight] = []
        self._released: list[Sequence] = []
        self._changed = asyncio.Event()
        self.has_begun = asyncio.Event()
        """Set when the device thread is ready for its first step."""
        self._stalled_at_s: float | None = None
        self.num_steps = 0
        self._ended_at_s = clock.now_s()
        """When the device ended the last step that has landed."""
        self._launch_s = LAUNCH_S
        """Seconds before a step's end by which the next one is planned: more on a slow or busy host."""
        self._observers: list[StepObserver] = []
        self._stall_listeners: list[Callable[[], bool]] = []
        # Whoever releases blocks, in here or not, may have made room for who waits.
        pool.on_release(self._changed.set)

    def on_step(self, observer: StepObserver) -> None:
        """Notify `observer` of each step that succeeded, the seconds that the device had it, and its end.

        That is sooner than now where a thread had something else to launch meanwhile."""
        self._observers.append(observer)

    def on_stall(self, listener: Callable[[], bool]) -> None:
        """Call `listener` where a sequence waited too long for blocks; it returns whether it gives some."""
        self._stall_listeners.append(listener)

    def predict_steps(self, cost: StepCost | None) -> None:
        """Budget steps by what a profile says of them; None: `chunk_tokens` alone bounds them.

        How far a profile is off here is known of that one alone. A pipeline's steps overlap: what one of
        them takes is no gap, and none is budgeted.
        """
        cost = None if self._runner.is_pipelined else cost
        if cost != self.scheduler.step_cost:
            self.scheduler.correction = StepCorrection()
        self.scheduler.step_cost = cost

    def add(self, sequence: Sequence, listener: Listener, on_launch: LaunchListener | None = None) -> None:
        """Run `sequence`; call `listener` on the event loop for each step that it was in.

        The listener is called until an output has a finish reason, or `release`; the sequence keeps its
        blocks until `release`. `on_launch` is called when a step with the sequence is launched, before it has
        run; not of a step that moves blocks in or out.

        Raises:
            InvalidRequestError, CapacityError: as `Scheduler.add`; nothing was taken.
        """
        if sequence.num_prompt_logprobs is not None and not self._runner.can_score:
            raise InvalidRequestError(
                "logprobs of the prompt (echo with logprobs) are computed by no node of this kind", "echo"
            )
        if sequence.pooling is not None and sequence.pooling not in self._runner.poolings:
            raise InvalidRequestError(
                f"embeddings of {sequence.pooling.value} pooling are computed by no node of this kind"
            )
        self.scheduler.add(sequence)
        self._listeners[sequence] = listener
        if on_launch is not None:
            self._launch_listeners[sequence] = on_launch
        self._changed.set()

    def release(self, sequence: Sequence) -> None:
        """End `sequence`, whatever its state, and give its blocks back. Again: no effect.

        Its listener is not called any more. Blocks that a step in flight writes to come back when it ends."""
        self._listeners.pop(sequence, None)
        self._launch_listeners.pop(sequence, None)
        if any(sequence in flight.sequences for flight in self._flights):
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, FinishReason.CANCELLED)
            self._released.append(sequence)
        else:
            self.scheduler.release(sequence)

    def proven(self, sequence: Sequence) -> None:
        """Publish what `sequence` came with, which is intact, and what was computed from it."""
        sequence.is_proven = True
        self.scheduler.publish(sequence)

    async def run(self) -> None:
        """Run steps until cancelled; then wait for those in flight, because memory that they write to may be
        unmapped once this has returned."""
        with self._thread("device") as device, self._thread("pipeline-end") as end:
            # A step must be launched into a pipeline while another one is waited for.
            waiting = end if self._runner.is_pipelined else device
            await uninterrupted(asyncio.get_running_loop().run_in_executor(device, self._begin))
            self.has_begun.set()
            try:
                while True:
                    if (plan := self._next_plan()) is not None:
                        self._launch(device, plan)
                    else:
                        await self._change(waiting)
            finally:
                await uninterrupted(self._land_all(waiting))

    def _begin(self) -> None:
        try:
            self._runner.begin()
        except StopIteration as error:
            raise RuntimeError("the runner ended with StopIteration as it began") from error

    def _next_plan(self) -> StepPlan | None:
        """Return a step to launch now; None: first something has to land or to change."""
        if len(self._flights) == self._runner.max_steps:
            return None
        if not self._flights or self._runner.is_pipelined:
            return self.scheduler.schedule(self._clock.now_s())
        # Once the device thread waits for a step, it launches nothing before that has ended.
        last = self._flights[-1]
        if last.landing is not None or last.has_failed:
            return None
        last.left_s = self._until_planned_s(last)
        if last.left_s > 0:
            return None
        return self.scheduler.schedule_ahead(last.plan, self._began_at_s(last))

    def _began_at_s(self, flight: _Flight) -> float:
        """Return when the device began with the first step in flight."""
        return max(flight.launched_at_s, self._ended_at_s)

    def _until_planned_s(self, first: _Flight) -> float:
        """Return the seconds until the step after the first in flight is planned; 0: it is time.

        Until then the device thread waits for nothing: it has to launch that one."""
        if first.next_planned_at_s is None:
            after_s = self.scheduler.planned_after_s(first.plan, self._launch_s)
            first.next_planned_at_s = self._began_at_s(first) + after_s
        left_s = first.next_planned_at_s - self._clock.now_s()
        return left_s if left_s > SOON_S else 0.0

    def _launch(self, thread: Executor, plan: StepPlan) -> None:
        self._stalled_at_s = None
        now_s = self._clock.now_s()
        sequences = frozenset(entry.sequence for entry in plan.entries)
        launched = thread.submit(self._runner.launch, plan)
        self._listen(plan, launched)
        flight = _Flight(plan, sequences, launched, now_s)
        self._flights.append(flight)
        if len(self._flights) == 1 or self._runner.is_pipelined:
            flight.begins(now_s)

    def _listen(self, plan: StepPlan, launched: Future[LaunchedStep]) -> None:
        """Have the plan's launch listeners called, on the event loop, once it is launched.

        Of one that cannot be launched the loop knows at once: none is planned to follow it."""
        # Blocks that a step moves in are there when it has ended.
        is_heard = not plan.swaps and any(entry.sequence in self._launch_listeners for entry in plan.entries)
        loop = asyncio.get_running_loop()

        def notify(step: LaunchedStep) -> None:
            for entry in plan.entries:
                if listener := self._launch_listeners.get(entry.sequence):
                    listener(LaunchedChunk(entry, step.layer_groups))

        # Leads not to `launched`, which keeps it: else the garbage collector alone finds steps of the past.
        def on_done(done: Future[LaunchedStep]) -> None:
            if done.cancelled():
                return
            if done.exception() is not None:
                loop.call_soon_threadsafe(self._changed.set)
            elif is_heard:
                loop.call_soon_threadsafe(notify, done.result())

        launched.add_done_callback(on_done)

    async def _change(self, waiting: Executor) -> None:
        """Return when a step has landed, or something changed so that another step may be planned."""
        self._changed.clear()
        first = self._flights[0] if self._flights else None
        # as it was when no step was planned: had the time come since, the device would wait for the next
        if first is not None and first.landing is None and first.left_s > 0 and not first.has_failed:
            await self._changed_within(first.left_s)
            return
        if first is not None and first.landing is None:
            first.landing = self._wait_in(waiting, first)
            first.landing.add_done_callback(lambda _: self._changed.set())
        if first is None and self.scheduler.num_waiting:
            await self._until_unstalled()
        else:
            self._stalled_at_s = None
            await self._changed.wait()
        if first is not None and first.landing is not None and first.landing.done():
            self._land(first, first.landing)

    async def _changed_within(self, seconds: float) -> None:
        """Return when something changed, or after some seconds."""
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _until_unstalled(self) -> None:
        """Return when something changed, or end a sequence that has waited too long for blocks."""
        now_s = self._clock.now_s()
        if self._stalled_at_s is None:
            self._stalled_at_s = now_s
        try:
            async with asyncio.timeout(max(0.0, self._stalled_at_s + STALL_S - now_s)):
                await self._changed.wait()
        except TimeoutError:
            if any(gives_back() for gives_back in self._stall_listeners):
                self._stalled_at_s = self._clock.now_s() - STALL_S + GIVEN_S
                return
            self._stalled_at_s = None
            sequence = self.scheduler.give_up()
            if sequence is not None:
                event(log, "no blocks came free", level=logging.WARNING, request_id=sequence.request_id)
                self._notify(SequenceOutput(sequence, (), FinishReason.ERROR))

    async def _land_all(self, waiting: Executor) -> None:
        """Wait for what is in flight, and take in none of its results."""
        landings = [flight.landing or self._wait_in(waiting, flight) for flight in self._flights]
        await asyncio.gather(*landings, return_exceptions=True)
        for flight in self._flights:
            self.scheduler.landed(flight.plan)
        self._flights.clear()
        self._release_landed()

    def _wait_in(self, waiting: Executor, flight: _Flight) -> asyncio.Future[StepResult]:
        return asyncio.get_running_loop().run_in_executor(waiting, flight.wait)

    def _land(self, flight: _Flight, landing: asyncio.Future[StepResult]) -> None:
        self._flights.remove(flight)
        flight.landing = None  # it keeps the frames that raised, which keep the flight
        if error := landing.exception():
            if not isinstance(error, Exception):
                raise error
            self._ended_at_s = self._clock.now_s()
            outputs = self._failed(flight.plan, error)
        else:
            seconds, is_measured = self._seconds_of(flight)
            for observe in self._observers:
                observe(flight.plan, seconds, self._ended_at_s)
            result = landing.result()
            for sequence in flight.sequences:
                sequence.busy_s += result.busy_s
            measured_s = seconds if is_measured else 0.0
            outputs = self.scheduler.commit(flight.plan, result, measured_s, self._clock.now_s())
        if self._flights and not self._runner.is_pipelined:
            following = self._flights[0]
            following.begins(self._began_at_s(following))
        self._release_landed()
        self.num_steps += 1
        for output in outputs:
            self._notify(output)

    def _seconds_of(self, flight: _Flight) -> tuple[float, bool]:
        """Return the seconds of a step that lands now, and whether they were measured; note when it ended.

        Launching a step that is not captured may take longer than the one under way, which then has ended
        before the thread waits for it: as predicted, if that is sooner than it landed. Then the one after is
        planned sooner from now on, unless it was planned at once."""
        now_s, began_s = self._clock.now_s(), self._began_at_s(flight)
        predicted_s = self.scheduler.predicted_s(flight.plan)
        if not flight.was_over:
            self._launch_s = max(LAUNCH_S, self._launch_s * IN_TIME)
        elif flight.next_planned_at_s is not None and flight.next_planned_at_s > began_s:
            self._launch_s *= LATE
        is_measured = not (flight.was_over and 0.0 < predicted_s < now_s - began_s)
        self._ended_at_s = now_s if is_measured else began_s + predicted_s
        return self._ended_at_s - began_s, is_measured

    def _release_landed(self) -> None:
        """Give back what was released while steps were in flight that wrote to it."""
        released, self._released = self._released, []
        for sequence in released:
            self.release(sequence)

    def _failed(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        level = logging.WARNING if isinstance(error, ServeError) else logging.ERROR
        names = ",".join(entry.sequence.request_id for entry in plan.entries)
        event(log, "step failed", level=level, requests=names, error=f"{type(error).__name__}: {error}")
        log.debug("step failed", exc_info=error)
        error.__traceback__ = None  # it keeps these frames too, and is kept by what was launched
        return self.scheduler.fail(plan)

    def _notify(self, output: SequenceOutput) -> None:
        take = self._listeners.get if output.finish_reason is None else self._listeners.pop
        if listener := take(output.sequence, None):
            listener(output)
