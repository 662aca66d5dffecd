"""How a command reaches a running `conductor up`: a socket file, one for each cluster.

    client    {"verb": "scale", "prefill": 3}         one line of JSON; "dry_run": true changes nothing
    server    {"said": "prefill-2: ready"}            any number of lines
              {"done": true}  or  {"error": "..."}    the last

A socket file and no port: who may write to the folder may stop the cluster anyway, and
nobody else can reach it. Its path may be longer than the 107 bytes that the kernel takes: it is named by
way of its open folder.

A change ends with its client: who hangs up, or shuts its sending half (Ctrl-C), stops it. One change is made
at a time, and a later one replaces it: an operator who asks again knows better than before. Both clients get
a line about it, and `{"verb": "status"}` says what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from base.errors import ConfigError
from deploy.change import Change, ChangeStoppedError
from deploy.clusters import Running, folder_of

if TYPE_CHECKING:
    from deploy.pools import NodePools  # and Ray, which a command that asks has no use for

MAX_LINE_BYTES = 4096
CHANGE_TIMEOUT_S = 3600.0
"""Between two lines of an answer: a host may first have to be started for a node."""

STATUS_TIMEOUT_S = 5.0

MAX_NODES = 1000
"""Of one pool. More are a slip of the finger: each is a process."""

WANTED = '{"verb": "scale"} with sizes, {"verb": "restart"} or {"verb": "status"} is wanted'


@contextmanager
def _socket_path(identity: Running) -> Iterator[str]:
    """Yield a path of the cluster's socket that is short, however long that of its folder."""
    folder = os.open(folder_of(identity.cache_dir), os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{identity.socket_name}"
    finally:
        os.close(folder)


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
            except (ConfigError, RuntimeError, ValueError) as error:
                say({"error": str(error)})
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    with _socket_path(identity) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE_BYTES)
        os.chmod(path, 0o600)
        try:
            yield
        finally:
            server.close()
            changes.end()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


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
                wanted = _sizes(sizes)
                await self._pools.tell_plan(wanted.get("prefill"), wanted.get("decode"), say)
            case {"verb": "scale", **sizes}:
                wanted = _sizes(sizes)
                typed = " ".join(["scale", *(f"{pool}={size}" for pool, size in wanted.items())])
                change = Change(typed, say)
                await self._make(
                    change,
                    reader,
                    lambda: self._pools.scale(wanted.get("prefill"), wanted.get("decode"), change),
                )
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


def _sizes(sizes: dict[Any, Any]) -> dict[str, int]:
    return {str(key): _size(str(key), size) for key, size in sizes.items()}


def _size(key: str, size: object) -> int:
    if key not in ("prefill", "decode"):
        raise ValueError(f"{key}: prefill and decode are known")
    # True is an int to Python
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_NODES:
        raise ValueError(
            f"{key}: a whole number from 0 to {MAX_NODES} is wanted, not {json.dumps(size)[:40]}"
        )
    return size


def ask(identity: Running, request: dict[str, Any], timeout_s: float = CHANGE_TIMEOUT_S) -> Iterator[str]:
    """Ask a running `conductor up` for a change; yield what it says until it is made.

    The first Ctrl-C stops the change, and what it then says comes yet; a second is raised.

    Raises:
        ConfigError: nobody listens there, or the change was not made; the message says why.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(timeout_s)
        try:
            with _socket_path(identity) as path:
                connection.connect(path)
        except OSError as error:
            told = "it takes changes from when it serves, and as long as its Ray lives"
            raise ConfigError(f"cluster {identity}: {error}: {told}") from error
        connection.sendall(json.dumps(request).encode() + b"\n")
        for line in _lines(connection):
            told = json.loads(line)
            if "error" in told:
                raise ConfigError(told["error"])
            if "said" not in told:
                return
            yield told["said"]
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
