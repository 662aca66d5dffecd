"""How a command reaches a running `conductor up`: a socket file, one for each cluster.

    client    {"verb": "scale", "prefill": 3}         one line of JSON; "dry_run": true changes nothing
    server    {"said": "prefill-2: ready"}            any number of lines
              {"done": true}  or  {"error": "..."}    the last

A socket file and no port: who may write to the folder may stop the cluster anyway, and
nobody else can reach it.

A change ends with its client: who hangs up, or shuts its sending half (Ctrl-C), stops it. One change is made
at a time, and a later one replaces it: an operator who asks again knows better than before. Both clients get
a line about it, and `{"verb": "status"}` says what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from base.errors import ConfigError
from base.lifeline import at_path, listen_at
from deploy.change import Change, ChangeStoppedError
from deploy.clusters import Running

if TYPE_CHECKING:
    from deploy.pools import NodePools  # and Ray, which a command that asks has no use for

MAX_LINE_BYTES = 4096
CHANGE_TIMEOUT_S = 3600.0
"""The longest pause between two lines of an answer: a host may first have to be started for a node."""

STATUS_TIMEOUT_S = 5.0

MAX_NODES = 1000
"""The most nodes of one pool. More are a slip of the finger: each is a process."""

WANTED = '{"verb": "scale"} with sizes, {"verb": "restart"} or {"verb": "status"} is wanted'


@asynccontextmanager
async def controlled(pools: NodePools, identity: Running) -> AsyncIterator[None]:
    """Take changes to `pools` for the length of the body."""
    changes = _Changes(pools)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(line).encode() + b"\n")

        with contextlib.closing(writer):
            try:
                asked = json.loads(await reader.readline())
                await changes.answer(asked, reader, lambda text: say({"said": text}))
                say({"done": True})
            except (ConfigError, RuntimeError, ValueError, OSError) as error:
                say({"error": str(error)})
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    server = await asyncio.start_unix_server(
        serve, sock=listen_at(identity.socket_path), limit=MAX_LINE_BYTES
    )
    try:
        yield
    finally:
        server.close()
        changes.end()
        identity.socket_path.unlink(missing_ok=True)


class _Changes:
    """The changes of one cluster, of which one is under way at a time."""

    def __init__(self, pools: NodePools) -> None:
        self._pools = pools
        self._latest: Change | None = None

    def end(self) -> None:
        """Stop the change under way, because the cluster ends."""
        if self._latest is not None:
            self._latest.stop("the cluster ends")

    async def answer(self, asked: object, reader: asyncio.StreamReader, say: Callable[[str], None]) -> None:
        """Carry out what was asked, whatever its shape; raises ValueError for what is no request."""
        match asked:
            case {"verb": "status", **rest} if not rest:
                if self._latest is not None:
                    say(f"under way: {self._latest.what}; {self._latest.progress}")
            case {"verb": "scale", "dry_run": True, **sizes}:
                await self._pools.say_plan(*_checked(sizes), say)
            case {"verb": "scale", **sizes}:
                wanted = _checked(sizes)
                change = Change(" ".join(["scale", *(f"{key}={size}" for key, size in sizes.items())]), say)
                await self._make(change, reader, lambda: self._pools.scale(*wanted, change))
            case {"verb": "restart", **rest} if not rest:
                change = Change("restart", say)
                await self._make(change, reader, lambda: self._pools.restart(change))
            case _:
                raise ValueError(f"unknown request: {WANTED}")

    async def _make(self, change: Change, reader: asyncio.StreamReader, begin: Callable[[], Any]) -> None:
        earlier, self._latest = self._latest, change
        watching = asyncio.create_task(_stop_with_client(change, reader))
        try:
            if earlier is not None:
                change.say(f"replaces `{earlier.what}`: {earlier.progress}")
                earlier.stop(f"replaced by `{change.what}`")
                await earlier.ended.wait()
            if change.is_stopped:
                raise ChangeStoppedError(f"{change.why}: {change.progress}")
            await begin()
        finally:
            watching.cancel()
            change.ended.set()
            if self._latest is change:
                self._latest = None


async def _stop_with_client(change: Change, reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(MAX_LINE_BYTES):
            pass  # it has nothing to say any more
    change.stop("stopped, as its client was")


def _checked(sizes: dict[Any, Any]) -> tuple[int | None, int | None]:
    """Return the wanted sizes of both pools; raises ValueError for what is none."""
    for key, size in sizes.items():
        if key not in ("prefill", "decode"):
            raise ValueError(f"{key}: prefill and decode are known")
        # True is an int to Python
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_NODES:
            wanted = f"a whole number from 0 to {MAX_NODES} is wanted"
            raise ValueError(f"{key}: {wanted}, not {json.dumps(size)[:40]}")
    return sizes.get("prefill"), sizes.get("decode")


def ask(identity: Running, request: dict[str, Any], timeout_s: float = CHANGE_TIMEOUT_S) -> Iterator[str]:
    """Ask a running `conductor up` for a change; yield what it says until it is made.

    The first Ctrl-C stops the change, and what it then says comes yet; a second is raised.

    Raises:
        ConfigError: nobody listens there, or the change was not made; the message says why.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(timeout_s)
        try:
            at_path(identity.socket_path, connection.connect)
        except OSError as error:
            when = "it takes changes from when it serves, and as long as its Ray lives"
            raise ConfigError(f"cluster {identity}: {error}: {when}") from error
        connection.sendall(json.dumps(request).encode() + b"\n")
        for line in _lines(connection):
            answer = json.loads(line)
            if "error" in answer:
                raise ConfigError(answer["error"])
            if "said" not in answer:
                return
            yield answer["said"]
    raise ConfigError(f"cluster {identity}: `conductor up` ended before the change was made")


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Yield the lines of an answer as they come."""
    rest, is_stopping = b"", False
    while True:
        try:
            part = connection.recv(MAX_LINE_BYTES)
        except KeyboardInterrupt:
            if is_stopping:
                raise
            is_stopping = True
            connection.shutdown(socket.SHUT_WR)
            continue
        if not part:
            return
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
