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
import itertools
import math
import selectors
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
        self._backlog = []

    def kill(self):
        self.is_dead = True
        self._backlog.clear()

    def stop(self):
        self.is_stopped = True

    def go_on(self):
        """What would have been called meanwhile is called, unless it was cancelled since."""
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            if not self.is_dead and not call.handle.cancelled():
                call.context.run(call)

    def postpone(self, call):
        self._backlog.append(call)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class _Call:
    """A callback of a process."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(self, process, callback, args, context):
        self.process, self.callback, self.args, self.context = process, callback, args, context

    def __call__(self):
        process = self.process
        if process.is_dead:
            return
        if process.is_stopped:
            process.postpone(self)
            return
        self.callback(*self.args)
        process.check()


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


class _NoWait(selectors.DefaultSelector):
    """Moves the loop's clock by what it would have waited."""

    def __init__(self, after_each):
        super().__init__()
        self.now_s = 0.0
        self.num_turns = 0
        self._after_each = after_each

    def select(self, timeout=None):
        self._after_each()
        self.num_turns += 1
        if timeout is None:
            raise Violation("everybody waits for ever")
        if self.num_turns > MAX_EVENTS:
            raise Violation("no end of events")
        self.now_s += max(0.0, timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """Time comes in multiples of `grain_s`, so that things happen together, as they do; 0: never.

    Also a clock. `work_s()`: how many seconds a thread has a piece of work, and if it does it at once.
    """

    def __init__(self, work_s, after_each=lambda: None, grain_s=0.0, violations=None):
        self._virtual = _NoWait(after_each)
        self._grain_s = grain_s
        self._numbers = itertools.count()
        self._work_s = work_s
        self.violations = [] if violations is None else violations
        """What must never be, and was."""
        super().__init__(self._virtual)
        self.set_task_factory(self._task)
        self.set_exception_handler(self._broke)

    def time(self):
        return self._virtual.now_s

    def now_s(self):
        return self._virtual.now_s

    def call_soon(self, callback, *args, context=None):
        context = copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        call = _Call(process, callback, args, context)
        call.handle = super().call_soon(call, context=context)
        return call.handle

    call_soon_threadsafe = call_soon

    def call_at(self, when, callback, *args, context=None):
        if self._grain_s:
            when = math.ceil(when / self._grain_s) * self._grain_s
        context = copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        call = _Call(process, callback, args, context)
        call.handle = super().call_at(when, call, context=context)
        return call.handle

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
