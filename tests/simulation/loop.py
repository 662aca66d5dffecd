"""An event loop on which a whole cluster runs in virtual time, one seed the same way each time.

Time passes when there is nothing else to do. There is no file descriptor and no thread: what
is handed to an executor runs on the loop, at either end of the time that it is said to take.

A `Process` is what one process of the cluster would be. What is called in its context belongs
to it: a process that is killed is never called again, and no `finally` of its runs; one that is
stopped is called when it goes on. After each call its `check` is called.

Tasks have numbers for hashes, because a TaskGroup cancels its tasks in the order of a set.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from concurrent.futures import Executor, Future
from contextvars import ContextVar, copy_context

MAX_EVENTS = 400_000
"""Of one run; more means that something goes round in circles."""


class Violation(AssertionError):  # noqa: N818
    """What must never be, was."""


class Process:
    """What is called in its context, and whether it is called at all."""

    def __init__(self, name, check=lambda: None):
        self.name = name
        self.check = check
        self.is_dead = self.is_stopped = False
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self._backlog = deque()

    def kill(self):
        self.is_dead = True
        self._backlog.clear()

    def stop(self):
        self.is_stopped = True

    def go_on(self):
        """What would have been called meanwhile is called, unless it was cancelled since.

        One in each turn of the loop, as an event loop finds what lies in its sockets: what the first
        has woken runs before the second comes.
        """
        self.is_stopped = False
        self._catch_up()

    def _catch_up(self):
        if self._backlog and not self.is_stopped:
            call = self._backlog.popleft()
            asyncio.get_running_loop().call_soon(self._catch_up, context=copy_context())
            if not call.is_cancelled:
                call()

    def postpone(self, call):
        self._backlog.append(call)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Call:
    """A callback, of a process or of nobody: also the handle by which it is cancelled."""

    __slots__ = ("_args", "_callback", "_context", "_process", "is_cancelled")

    def __init__(self, callback, args, context):
        self._callback, self._args, self._context = callback, args, context
        self._process = context.get(PROCESS)
        self.is_cancelled = False

    def __call__(self):
        process = self._process
        if process is None:
            self._context.run(self._callback, *self._args)
        elif process.is_stopped:
            process.postpone(self)
        elif not process.is_dead:
            self._context.run(self._callback, *self._args)
            process.check()

    def cancel(self):
        self.is_cancelled = True
        self._callback = self._args = None

    def cancelled(self):
        return self.is_cancelled


class _Task(asyncio.Task):
    """A task with a number; one that a kill left behind is silent about it."""

    _log_destroy_pending = False

    def __init__(self, coro, *, number, **more):
        self.number = number
        super().__init__(coro, **more)

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self is other


class SimLoop(asyncio.BaseEventLoop):
    """Time comes in multiples of `grain_s`, so that things happen together, as they do; 0: never.

    Also a clock. `work_s()`: how many seconds a thread has a piece of work, and if it does it at once.

    What is due lies in a queue and a heap of its own, because asyncio's take half as long again as
    all that is simulated: with handles that are compared in Python, and a selector asked in between.
    """

    def __init__(self, work_s, after_each=lambda: None, grain_s=0.0, violations=None):
        super().__init__()
        self._now_s = 0.0
        self._num_turns = 0
        self._after_each = after_each
        self._grain_s = grain_s
        self._numbers = itertools.count()
        self._due = deque()
        self._timers = []
        self._work_s = work_s
        self.violations = [] if violations is None else violations
        """What must never be, and was."""
        self.set_task_factory(self._task)
        self.set_exception_handler(self._broke)

    def time(self):
        return self._now_s

    def now_s(self):
        return self._now_s

    def call_soon(self, callback, *args, context=None):
        call = _Call(callback, args, copy_context() if context is None else context)
        self._due.append(call)
        return call

    call_soon_threadsafe = call_soon

    def call_at(self, when, callback, *args, context=None):
        if self._grain_s:
            when = math.ceil(when / self._grain_s) * self._grain_s
        call = _Call(callback, args, copy_context() if context is None else context)
        # What is due at the same moment comes in the order it was asked for.
        heapq.heappush(self._timers, (when, next(self._numbers), call))
        return call

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self):
        """Called by `run_forever`: call what is due now; where nothing is, it is later."""
        self._after_each()
        self._num_turns += 1
        if self._num_turns > MAX_EVENTS:
            raise Violation("no end of events")
        due, timers = self._due, self._timers
        while timers and (timers[0][2].is_cancelled or not due or timers[0][0] <= self._now_s):
            when, _, call = heapq.heappop(timers)
            if not call.is_cancelled:
                self._now_s = max(self._now_s, when)
                due.append(call)
        if not due:
            raise Violation("everybody waits for ever")
        for _ in range(len(due)):
            call = due.popleft()
            if not call.is_cancelled:
                try:
                    call()
                except Exception as error:
                    self.violations.append(repr(error))

    def run_in_executor(self, executor, func, *args):
        """Run `func` at the beginning or at the end of the time it takes, and end when that is over."""
        done = self.create_future()
        seconds, is_first = self._work_s()
        outcome = self._worked(func, args) if is_first else None
        self.call_later(seconds, self._end_work, done, outcome, func, args)
        return done

    def _broke(self, loop, told):
        self.violations.append(repr(told.get("exception", told["message"])))

    def _worked(self, func, args):
        try:
            return func(*args), None
        except Exception as error:
            if isinstance(error, AssertionError):
                self.violations.append(error)
            return None, error

    def _end_work(self, done, outcome, func, args):
        result, error = outcome or self._worked(func, args)
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _task(self, loop, coro, **more):
        return _Task(coro, number=next(self._numbers), loop=loop, **more)


class InlineExecutor(Executor):
    """Runs what is submitted at once: a launch takes no time, what was launched does."""

    def __init__(self, name=""):
        pass

    def submit(self, fn, /, *args, **more):
        outcome = Future()
        try:
            outcome.set_result(fn(*args, **more))
        except Exception as error:
            outcome.set_exception(error)
        return outcome
