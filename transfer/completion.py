"""The end of work that other threads do on memory, and waiting for it under cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any


def begin(work: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run `work` until it has to wait; return its rest, for the same task, or None. Raises as it does.

    A timer and its end cost 12 us, more than a small batch over shared memory, which mostly has
    nothing to wait for.
    """
    try:
        return _rest_of(work, work.send(None))
    except StopIteration:
        return None


@types.coroutine
def _rest_of(work: Coroutine[Any, Any, None], waits_for: object) -> Generator[object, None, None]:
    try:
        while True:
            try:
                yield waits_for
            except BaseException as error:
                waits_for = work.throw(error)
            else:
                waits_for = work.send(None)
    except StopIteration:
        return
    finally:
        del waits_for  # it may hold the error, whose traceback holds this frame


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Run `call` on an event loop soon, from any thread. A loop that was closed has nobody who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


class Latch:
    """Calls `done` when `count_down` was called so many times, on whatever threads: on the last one's."""

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._done = done

    def count_down(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            self._done()


class Completion:
    """Ends once, from any thread; one task waits for it.

    `asyncio.wait` and `shield` would do the waiting too. They cost 20 us, which is half
    of a small transfer.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._future: asyncio.Future[None] | None = None
        self.is_over = False
        """Whether the loop knows that the work has ended."""
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        """Note that the work has ended: it touches no memory any more."""
        self._error = error
        self.on_loop(self._end)

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop: now, if that is the thread we are on."""
        if threading.get_ident() == self._loop_thread:
            call()
        else:
            post(self._loop, call)

    async def wait(self, cancel: Callable[[], None]) -> None:
        """Return or raise as the work did, and never before it has ended.

        Cancelled, it calls `cancel`, waits for the end all the same, and only then lets
        the cancellation through: the caller is about to reuse the memory.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.is_over:
            # Anew each time: cancelling a task cancels the future that it waits for.
            self._future = self._loop.create_future()
            try:
                await self._future
            except asyncio.CancelledError as error:
                cancelled = error
                cancel()
        failed, self._error = cancelled or self._error, None
        try:
            if failed is not None:
                raise failed
        finally:
            del cancelled, failed  # whose traceback holds this frame

    def _end(self) -> None:
        self.is_over = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
