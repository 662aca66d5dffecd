"""Open-loop load: requests are sent when they are due, whether or not earlier ones are answered.

A closed loop (so many clients, each waiting for its answer) slows down with the server and hides
its queues. Here a slow server meets the same arrivals as a fast one. Where `max_concurrency`
bounds that, or this process falls behind, the delay is measured and reported. Within a session each
turn waits for the answer before it, as its user would; and where so many sessions at a time are asked
for, each begins when another has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.sse_client import Outcome, Server, complete
from bench.workload import LoadRequest


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Everything a load gave."""

    outcomes: list[Outcome]
    delays_s: list[float]
    """Seconds from when each request was due to when it was sent."""
    duration_s: float


async def run_load(
    server: Server,
    load: Iterable[LoadRequest],
    max_concurrency: int | None,
    progress: Callable[[int], None],
    sessions: int | None = None,
    cut_s: float | None = None,
) -> LoadRun:
    """Send a load and wait for all answers.

    Args:
        load: By arrival; taken one at a time.
        max_concurrency: Requests at once; None: no bound.
        progress: Called with the number of answered requests.
        sessions: At a time, whatever their arrivals; None: they come when they come.
        cut_s: Seconds after which no more is sent, and what is not answered forgotten; None: never.
    """
    run = _Run(server, max_concurrency, progress)
    waiting, started_at_s = iter(load), time.monotonic()

    async def one_after_another() -> None:
        for request in waiting:
            await run.session(request, time.monotonic())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(cut_s), asyncio.TaskGroup() as run.tasks:
            if sessions is not None:
                for _ in range(sessions):
                    run.tasks.create_task(one_after_another())
            else:
                for request in waiting:
                    due_s = started_at_s + request.at_s
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    run.tasks.create_task(run.session(request, due_s))
    return LoadRun(run.outcomes, run.delays_s, time.monotonic() - started_at_s)


class _Run:
    """A load that is being sent."""

    def __init__(self, server: Server, max_concurrency: int | None, progress: Callable[[int], None]) -> None:
        self.tasks = asyncio.TaskGroup()
        self.outcomes: list[Outcome] = []
        self.delays_s: list[float] = []
        self._server = server
        self._room = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._progress = progress

    async def session(self, first: LoadRequest, due_s: float) -> None:
        """Send a request, and what its session asks when it is answered."""
        request = first
        context: list[int] = []
        for turn in itertools.count():
            # what the session said and was answered, and then what is new
            new_tokens = max(1, len(request.token_ids) - len(context))
            prompt = context + list(request.token_ids)[-new_tokens:]
            outcome = await self._send(prompt, request, due_s)
            outcome.turn = turn
            context = prompt + outcome.answer_ids if request.keeps_answer else []
            answered_s = time.monotonic()
            for fork in request.forks:
                self.tasks.create_task(self._fork(fork, answered_s))
            if request.next_turn is None:
                return
            request = request.next_turn
            due_s = answered_s + request.at_s
            await asyncio.sleep(request.at_s)

    async def _fork(self, first: LoadRequest, answered_s: float) -> None:
        await asyncio.sleep(first.at_s)
        await self.session(first, answered_s + first.at_s)

    async def _send(self, prompt: list[int], request: LoadRequest, due_s: float) -> Outcome:
        if self._room is not None:
            await self._room.acquire()
        try:
            self.delays_s.append(time.monotonic() - due_s)
            keeps = request.keeps_answer and request.next_turn is not None
            outcome = await complete(self._server, prompt, request.output_tokens, keeps)
            self.outcomes.append(outcome)
            self._progress(len(self.outcomes))
            return outcome
        finally:
            if self._room is not None:
                self._room.release()


async def warm_up(server: Server, num_requests: int, input_tokens: int) -> None:
    """Send some requests one after another, and forget them.

    Raises:
        ValueError: the server did not serve one.
    """
    for number in range(num_requests):
        outcome = await complete(server, [2000 + number] * input_tokens, 4)
        if outcome.error:
            raise ValueError(f"warm-up: {server.url}: {outcome.error}")
