"""Open-loop load: requests are sent when they are due, whether or not earlier ones are answered.

A closed loop (so many clients, each waiting for its answer) slows down with the server and hides
its queues. Here a slow server meets the same arrivals as a fast one. Where `max_concurrency`
bounds that, or this process falls behind, the delay is measured and told. Within a session each
turn waits for the answer before it, as its user would.
"""

from __future__ import annotations

import asyncio
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
    """Of each request: from when it was due to when it was sent."""
    duration_s: float


async def run_load(
    server: Server,
    load: Iterable[LoadRequest],
    max_concurrency: int | None,
    progress: Callable[[int], None],
) -> LoadRun:
    """Send a load and wait for all answers.

    Args:
        load: By arrival; taken one at a time.
        max_concurrency: Requests at once; None: no bound.
        progress: Told the number of answered requests.
    """
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    outcomes: list[Outcome] = []
    delays_s: list[float] = []

    async def send_all(request: LoadRequest | None, due_s: float) -> None:
        """Send a request, and what its session asks when it is answered."""
        while request is not None:
            await send(request, due_s)
            request = request.next_turn
            if request is not None:
                due_s = time.monotonic() + request.at_s
                await asyncio.sleep(request.at_s)

    async def send(request: LoadRequest, due_s: float) -> None:
        if room is not None:
            await room.acquire()
        try:
            delays_s.append(time.monotonic() - due_s)
            outcomes.append(await complete(server, list(request.token_ids), request.output_tokens))
            progress(len(outcomes))
        finally:
            if room is not None:
                room.release()

    started_at_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for request in load:
            due_s = started_at_s + request.at_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.create_task(send_all(request, due_s))
    return LoadRun(outcomes, delays_s, time.monotonic() - started_at_s)


async def warm_up(server: Server, num_requests: int, input_tokens: int) -> None:
    """Send some requests one after another, and forget them.

    Raises:
        ValueError: the server did not serve one.
    """
    for number in range(num_requests):
        outcome = await complete(server, [2000 + number] * input_tokens, 4)
        if outcome.error:
            raise ValueError(f"warm-up: {outcome.error}")
