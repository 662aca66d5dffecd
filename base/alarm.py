"""A block of a task that a callback may end: a client left, or took nothing for too long.

    with Alarm(GoneError) as alarm:     raises GoneError in the turn after `alarm.ring()`
        await work

Cancellation is how a task is interrupted, and its count is how two who interrupt it at once are kept apart:
each takes back its own, and whoever finds none left may turn it into an error. `asyncio.timeout` and
`asyncio.TaskGroup` do so too, so the three may lie in one another. A cancellation from outside wins.

A group or a timeout in its place takes as long as to read a body does. An error raised within a group is in a
ring of references with the group's own, and with it all that the request held: ten times too much load would
wait for the garbage collector, 0.1 s at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Alarm:
    """Cancels the task that entered it, and raises an error of its own where nobody else did."""

    __slots__ = ("_error", "_has_rung", "_num_before", "_task")

    def __init__(self, error: Callable[[], Exception]) -> None:
        """Begin. `error` makes what is raised at the end of a block that was rung out of."""
        self._error = error
        self._has_rung = False

    def __enter__(self) -> Alarm:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_before = task, task.cancelling()
        return self

    def ring(self, error: Callable[[], Exception] | None = None) -> None:
        """End the block, with `error` in place of its own. Once at most, and not after it."""
        self._error = error or self._error
        self._has_rung = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Who holds the alarm does not hold the task, which holds a cancellation that it ends with.
        task = self._task
        del self._task
        # Taken back whatever came of the block: with a count that is left, later alarms take their
        # own ring for a cancellation from outside.
        is_ours = self._has_rung and task.uncancel() <= self._num_before
        if is_ours and kind is asyncio.CancelledError:
            raise self._error() from None
