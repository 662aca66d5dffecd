"""A thread that waits for sockets, so that bulk bytes never wait for the event loop.

asyncio's own streams copy every byte twice in Python; and a call that moves 1 MiB holds
its thread for 0.3 ms, which is too long for a loop that also answers requests. Sockets
here are non-blocking and belong to one reactor; whoever else wants something of them
posts a call. Everything posted runs, in order, also while the reactor stops. A call that
breaks is logged and has no part in the next one: with the thread everything would end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
MAX_EVENTS = 64
"""Events taken in one call, for which memory is set aside each time."""
MAX_CAUGHT_UP = 256
"""Times that sockets are looked at in one call: a peer that goes on sending must not hold the event loop."""
PROCESSORS_EACH = 4
"""Processors of a node for each reactor, which copies for as long as bytes come."""


def num_reactors(connections: int) -> int:
    """Return how many reactors a process has that opens so many connections to each peer."""
    return max(1, min(connections, len(os.sched_getaffinity(0)) // PROCESSORS_EACH))


class Poller(Protocol):
    """Interface of the thread that owns sockets: a reactor, or the event loop."""

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None]) -> None:
        """Call `on_ready(events)` whenever `fd` is ready, instead of what was called before."""
        ...

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. Call before it is closed."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on that thread, soon."""
        ...


class LoopPoller:
    """The event loop as the owner of sockets: small frames go out with no change of thread.

    Two changes of thread and back cost a 64 KiB write more than its bytes do. Everything
    is called on the loop's own thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._ready = select.poll()

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None]) -> None:
        before, _ = self._watched.get(fd, (0, on_ready))
        if before & WRITABLE and not events & WRITABLE:
            self._loop.remove_writer(fd)
        if events & READABLE:
            self._loop.add_reader(fd, on_ready, READABLE)
        if events & WRITABLE:
            self._loop.add_writer(fd, on_ready, WRITABLE)
        self._watched[fd] = events, on_ready
        self._ready.register(fd, events)

    def forget(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            self._ready.unregister(fd)

    def catch_up(self) -> None:
        """Do now what the sockets are ready for, which the loop would do in its next turns."""
        for _ in range(MAX_CAUGHT_UP):
            ready = self._ready.poll(0)
            if not ready:
                return
            for fd, events in ready:
                if fd in self._watched:
                    self._watched[fd][1](events)

    def post(self, call: Callable[[], None]) -> None:
        call()


class Reactor:
    """Owns one epoll set and its thread. Only `post` and `stop` may be called from others."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, READABLE)
        self._watched: dict[int, Callable[[int], None]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._is_over = False
        self._ending = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the reactor's thread, soon; at once where that has ended."""
        self._posted.append(call)
        with self._ending:
            if self._is_over:
                self._run_posted()
            else:
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None]) -> None:
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = on_ready

    def forget(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def stop(self) -> None:
        """Run what was posted, end the thread and wait for it."""
        self.post(self._end)
        self._thread.join()
        with self._ending:
            self._is_over = True
            self._epoll.close()
            # Its number may be anybody's from here on.
            os.close(self._wake_fd)
            self._run_posted()

    def _end(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            for fd, events in self._epoll.poll(maxevents=MAX_EVENTS):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    self._run_posted()
                elif fd in self._watched:
                    # An earlier one of this turn may have closed it.
                    try:
                        self._watched[fd](events)
                    except BaseException:
                        log.exception("a socket's call broke")

    def _run_posted(self) -> None:
        while self._posted:
            try:
                self._posted.popleft()()
            except BaseException:
                log.exception("a posted call broke")
