"""Several coroutines at once, for work that goes on when one of them has failed.

Not `asyncio.TaskGroup`, which ends its own task's wait by cancelling it. Before Python 3.13 that cancellation
stays in the task's count when the group fails at its end, and one from outside that comes in the same turn is
raised as the group's error: who handles the error and goes on can be cancelled no more as it should be. Here
the task's count is changed by nobody but those who cancel it. And what leaves a group, a cancellation too, is
held by the group's own frame, which its traceback holds: it waits for the garbage collector, with all that
the frames above hold.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from base.alarm import Alarm
from base.uninterrupted import uninterrupted

T = TypeVar("T")

Begin: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Begins work beside the body of `beside`, which alone calls it."""


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what each of `work` does, in order, when all have ended.

    Raises:
        Exception: what the first that failed raised, alone; the others were cancelled and have ended.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    failed: BaseException | None = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task.exception() for task in tasks if task in done and _has_failed(task)), None)
    finally:
        await _ended(tasks)
        if failed is not None:
            del done, tasks  # they hold the error, whose traceback holds this frame
    try:
        if failed is not None:
            raise failed
    finally:
        del failed
    return [task.result() for task in tasks]


async def merged(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what several streams yield, as it comes. Consume under `contextlib.aclosing`.

    Closing closes them. A stream goes on when all that was yielded before is taken.

    Raises:
        Exception: what the first that failed raised, alone; the others were closed.
    """
    items: deque[T] = deque()
    has_come, are_taken = asyncio.Event(), asyncio.Event()

    async def feed(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                items.append(item)
                are_taken.clear()
                has_come.set()
                await are_taken.wait()

    work = asyncio.ensure_future(together(map(feed, streams)))
    work.add_done_callback(lambda _: has_come.set())
    try:
        while items or not work.done():
            await has_come.wait()
            has_come.clear()
            while items:
                yield items.popleft()
            are_taken.set()
    finally:
        await _ended([work])
    failed = work.exception()
    del work  # it holds the error, whose traceback holds this frame
    try:
        if failed is not None:
            raise failed
    finally:
        del failed


class _BesideFailedError(Exception):
    """Work beside a body has failed."""


@asynccontextmanager
async def beside() -> AsyncIterator[Begin]:
    """Give the body what begins work beside it, and return when all of that has ended.

    The first failure, of the body or of the work, ends the others, and is raised alone.
    """
    running: set[asyncio.Task[None]] = set()
    failed: list[asyncio.Task[None]] = []
    is_ending = False

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if _has_failed(task) and not is_ending and not failed:
            failed.append(task)
            alarm.ring()

    def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        running.add(task)
        task.add_done_callback(ended)
        return task

    with suppress(_BesideFailedError), Alarm(_BesideFailedError) as alarm:
        try:
            yield begin
            while running:
                await asyncio.wait(running)
        finally:
            is_ending = True
            await _ended(running)
    if failed:
        failed.pop().result()


def _has_failed(task: asyncio.Future[T]) -> bool:
    return not task.cancelled() and task.exception() is not None


async def _ended(tasks: Iterable[asyncio.Future[T]]) -> None:
    """Cancel those that run, and return when all have ended, whoever cancels meanwhile."""
    tasks = list(tasks)
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await uninterrupted(asyncio.wait(running))
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: else the loop logs one that nobody asked for
