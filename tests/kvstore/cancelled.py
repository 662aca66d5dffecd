"""Cancels a coroutine where it waits for the n-th time: each point of it, and no luck."""

import asyncio
import types


class CancelledAt:
    """Runs a coroutine as a task that is cancelled at its `wait`-th wait, counted from 0.

    As the wait begins; or, `answered`, when what it waits for is there and it has not seen it.
    """

    def __init__(self, coroutine, wait, answered):
        self._coroutine = coroutine
        self._left = wait
        self._answered = answered
        self.was_reached = False

    async def run(self):
        """Return whether there was such a wait; what the coroutine raised of itself is raised."""
        task = asyncio.ensure_future(self._counted())
        await asyncio.wait([task])
        if not self.was_reached:
            await task
        return self.was_reached

    @types.coroutine
    def _drive(self):
        error = None
        while True:
            try:
                waits_for = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as done:
                return done.value
            if self._left == 0:
                self.was_reached = True
                self._cancel(waits_for, asyncio.current_task())
            self._left -= 1
            try:
                yield waits_for
                error = None
            except BaseException as raised:  # of the test: it is the coroutine's to see
                error = raised

    def _cancel(self, waits_for, task):
        if self._answered and waits_for is not None:
            waits_for.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()

    async def _counted(self):
        return await self._drive()
