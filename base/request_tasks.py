"""One task for each request on a node: started by a message, ended by another.

The task's coroutine owns what the request holds and gives it back in its own `finally`;
ending a request is cancelling its task, and there is no second clean-up. This file is
the border at which an error becomes a `Failed` message: every request gets an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from base.errors import LostError, ServeError, errors_in
from base.logs import event
from base.messages import Failed, FromNode
from base.request import RequestId

log = logging.getLogger(__name__)


class RequestTasks:
    """The requests that one role of a node works on. Belongs to the event loop."""

    def __init__(self, group: asyncio.TaskGroup, send: Callable[[FromNode], None]) -> None:
        self._group = group
        self._send = send
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._ended: set[RequestId] = set()
        """Requests whose task `end` cancelled. The task's own count of cancellations does not say it: that of
        a time limit inside the work is taken back there, and the work goes on."""
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, request_id: RequestId, work: Coroutine[None, None, None]) -> asyncio.Task[None] | None:
        """Run `work` for `request_id` and return its task; None: this id runs already, and is refused."""
        if request_id in self._tasks:
            work.close()
            self._send(Failed(request_id, "ProtocolError", "this request id is at work already"))
            return None
        task = self._group.create_task(self._answered(request_id, work))
        self._tasks[request_id] = task
        self._idle.clear()
        task.add_done_callback(lambda _: self._forget(request_id, work))
        return task

    def end(self, request_id: RequestId) -> None:
        """Cancel the request's task, once; an id that is not here is nothing."""
        task = self._tasks.get(request_id)
        if task is not None and request_id not in self._ended:
            self._ended.add(request_id)
            task.cancel()

    def end_all(self) -> None:
        for request_id in list(self._tasks):
            self.end(request_id)

    async def idle(self) -> None:
        """Return when no request is at work."""
        await self._idle.wait()

    def _forget(self, request_id: RequestId, work: Coroutine[None, None, None]) -> None:
        work.close()  # a task that was cancelled before it began has not awaited it
        del self._tasks[request_id]
        self._ended.discard(request_id)
        if not self._tasks:
            self._idle.set()

    async def _answered(self, request_id: RequestId, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:
            self._failed(request_id, error)

    def _failed(self, request_id: RequestId, error: Exception) -> None:
        """Answer; in a frame that the error's traceback does not hold, since this one holds the error."""
        expected = first_serve_error(error)
        if expected is None:
            log.exception("request broke request_id=%s", request_id)
            expected = LostError("an error inside the node; see its log")
        event(
            log,
            "request failed",
            level=logging.WARNING,
            request_id=request_id,
            reason=type(expected).__name__,
            message=expected,
        )
        self._send(Failed(request_id, type(expected).__name__, str(expected)))


def first_serve_error(error: BaseException) -> ServeError | None:
    """Return the expected failure that `error` is, or that a group of errors holds."""
    return next((each for each in errors_in(error) if isinstance(each, ServeError)), None)
