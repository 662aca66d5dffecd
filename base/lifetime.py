"""How long a process lives: until SIGTERM or SIGINT, or while anybody holds its lifeline.

A lifeline (`base/lifeline.py`) is a connection to the process's socket. A supervisor holds one, and
`conductor up` another, so that a process outlives the death of either, of Ray too: the supervisor that Ray
starts in the place of a dead one connects, and is its supervisor then. When nobody has held a lifeline for
`ADOPTION_S`, the process drains and ends: nothing is left running for long after a killed launcher.

Standard input counts as a lifeline. The kernel closes it when whoever started the process dies, however it
dies; so a process that was given no socket, or never was ready, ends with its parent. A file or /dev/null
has no other end that could be closed: then a process lives until a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import signal
import stat
import sys
from pathlib import Path
from typing import cast

from base.lifeline import ANSWERS, ASKS, SUPERVISES, listen_at

NOBODY_HOLDS = "nobody holds the process"
ADOPTION_S = 30.0
"""Time from the last holder's end until a process drains. Ray starts a supervisor again within seconds."""

NEW_OBJECTS = 10_000
"""Objects made before the garbage collector looks at them."""


def spare_collector() -> None:
    """Let the garbage collector look at nothing that is there by now, and at new objects less often.

    It took 0.1 s of a conductor, in which nobody was served, every 3 s of many requests, and takes 0.4 s of a
    process with torch and transformers. Python's default of new objects took a tenth of a request's time.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


class Lifetime:
    """The end of a process, and who holds it until then."""

    def __init__(self, path: Path | None = None, adoption_s: float = ADOPTION_S) -> None:
        """Begin.

        Args:
            path: Of the socket's file; None: standard input is the only lifeline.
            adoption_s: How long a process that had a holder lives without one.
        """
        self._path = path
        self._adoption_s = adoption_s
        self._holders: set[object] = set()
        self._supervisors: set[object] = set()
        self.was_held = False
        """Whether anybody has ever held a lifeline of the process; standard input is none."""
        self._line = b""
        self._waiting: asyncio.TimerHandle | None = None
        self._stdin: asyncio.ReadTransport | None = None

    @property
    def is_supervised(self) -> bool:
        """Whether somebody starts this process again when it has ended."""
        return bool(self._supervisors)

    async def ready(self, **fields: object) -> None:
        """Take signals and holders, and write the line that a supervisor waits for: where we are reached."""
        loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[str] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number.name)
        self._line = json.dumps({"event": "ready", **fields}).encode() + b"\n"
        # A process whose parent has died leaves the socket to the one that was started in its place.
        if self._path is not None and _has_parent():
            listening = listen_at(self._path)
            # A server that nobody keeps is garbage, and uvloop's closes its socket then.
            self._server = await loop.create_unix_server(lambda: _Holder(self), sock=listening)
        parent = _Parent(self)
        if _is_held_open():
            self._stdin, _ = await loop.connect_read_pipe(lambda: parent, sys.stdin)
        else:
            parent.connection_made(None)
        spare_collector()
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stdout.buffer.write(self._line)
            sys.stdout.flush()
        if self._path is not None:
            # The pipe has one reader, who may die before us.
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def stopped(self) -> str:
        """Wait, after `ready`, for the process's end to be asked for; return by what."""
        try:
            return await self._stopped
        finally:
            if self._stdin is not None:
                self._stdin.close()

    def _stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)

    def held_by(self, holder: object) -> None:
        """Count `holder` among those for whom the process lives."""
        self._holders.add(holder)
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def supervised_by(self, holder: object) -> bytes:
        """Count `holder` among those that start the process again; return what it is sent."""
        self._supervisors.add(holder)
        return self._line

    def let_go_by(self, holder: object) -> None:
        """Count `holder` no more, and begin to wait for another if it was the last."""
        self._holders.discard(holder)
        self._supervisors.discard(holder)
        if not self._holders and not self._stopped.done():
            wait_s = self._adoption_s if self.was_held else 0.0
            self._waiting = asyncio.get_running_loop().call_later(wait_s, self._stop, NOBODY_HOLDS)


def _has_parent() -> bool:
    """Return whether anybody has the other end of standard input, which need not be a pipe."""
    ends = select.poll()
    ends.register(sys.stdin, 0)  # a hang-up is always said
    return not ends.poll(0)


def _is_held_open() -> bool:
    """Return whether standard input has another end, which its holder may close."""
    if sys.stdin is None:
        return False
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdin.isatty()


class _Parent(asyncio.Protocol):
    """Standard input: whoever started the process."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime

    def connection_made(self, transport: asyncio.BaseTransport | None) -> None:
        self._lifetime.held_by(self)
        self._lifetime.supervised_by(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lifetime.let_go_by(self)


class _Holder(asyncio.Protocol):
    """One lifeline."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no instances of it
        self._lifetime.was_held = True
        self._lifetime.held_by(self)

    def data_received(self, data: bytes) -> None:
        if SUPERVISES in data:
            self._transport.write(self._lifetime.supervised_by(self))
        self._transport.write(ANSWERS * data.count(ASKS))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lifetime.let_go_by(self)
