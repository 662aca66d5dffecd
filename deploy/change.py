"""A change of a running cluster, from its request to its end: what it says, and whether it is to stop.

It stops between two nodes, and never half-way through one: a node that is being started is ended, one that is
draining is waited for. What is ready by then stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from base.errors import ConfigError

T = TypeVar("T")


class ChangeStoppedError(ConfigError):
    """A change was not made to its end; the message says why, and what is there now."""


class Change:
    """One change under way."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self.what = what
        """The command as it was typed: scale prefill=3."""
        self.say = say
        self.progress = "nothing was changed yet"
        self.why = ""
        self.stopped = asyncio.Event()
        self.ended = asyncio.Event()

    def stop(self, why: str) -> None:
        """Let it end where it is. Idempotent."""
        self.why = self.why or why
        self.stopped.set()

    @property
    def is_stopped(self) -> bool:
        return self.stopped.is_set()


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; or, if `stop` is set sooner, cancel it and return None."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.wait([task])
    return None
