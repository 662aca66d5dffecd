"""How a command reaches a running `conductor up`: a socket file, one for each cluster.

    client    {"verb": "scale", "prefill": 3}         one line of JSON
    server    {"said": "prefill-2: ready"}            any number of lines
              {"done": true}  or  {"error": "..."}    the last

A socket file and no port: who may write to the folder may stop the cluster anyway, and
nobody else can reach it. Its path may be longer than the 107 bytes that the kernel takes: it is named by
way of its open folder. One change is made at a time; others wait their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from base.errors import ConfigError
from deploy.cluster import Cluster
from deploy.clusters import Running, folder_of

MAX_LINE_BYTES = 4096
CHANGE_TIMEOUT_S = 3600.0
"""Between two lines of an answer: a host may first have to be started for a node."""

MAX_NODES = 1000
"""Of one pool. More are a slip of the finger: each is a process."""


@contextmanager
def _socket_path(identity: Running) -> Iterator[str]:
    """Yield a path of the cluster's socket that is short, however long that of its folder."""
    folder = os.open(folder_of(identity.cache_dir), os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{identity.socket_name}"
    finally:
        os.close(folder)


@asynccontextmanager
async def controlled(cluster: Cluster, identity: Running) -> AsyncIterator[None]:
    """Take changes to `cluster` for the length of the body."""
    turn = asyncio.Lock()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: dict[str, Any]) -> None:
            writer.write(json.dumps(line).encode() + b"\n")

        with contextlib.closing(writer):
            try:
                asked = json.loads(await reader.readline())
                async with turn:
                    await _change(cluster, asked, lambda text: say({"said": text}))
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
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


async def _change(cluster: Cluster, asked: object, say: Callable[[str], None]) -> None:
    """Carry out what was asked, whatever its shape; raises ValueError for what is no request."""
    match asked:
        case {"verb": "scale", **sizes}:
            wanted = {str(key): _size(str(key), size) for key, size in sizes.items()}
            await cluster.scale(wanted.get("prefill"), wanted.get("decode"), say)
        case {"verb": "restart", **rest} if not rest:
            await cluster.restart(say)
        case _:
            raise ValueError('unknown request: {"verb": "scale"} with sizes or {"verb": "restart"} is wanted')


def _size(key: str, size: object) -> int:
    if key not in ("prefill", "decode"):
        raise ValueError(f"{key}: prefill and decode are known")
    # True is an int to Python
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_NODES:
        raise ValueError(
            f"{key}: a whole number from 0 to {MAX_NODES} is wanted, not {json.dumps(size)[:40]}"
        )
    return size


def ask(identity: Running, request: dict[str, Any]) -> Iterator[str]:
    """Ask a running `conductor up` for a change; yield what it says until it is made.

    Raises:
        ConfigError: nobody listens there, or the change was not made; the message says why.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(CHANGE_TIMEOUT_S)
        try:
            with _socket_path(identity) as path:
                connection.connect(path)
        except OSError as error:
            told = "it does not take changes before it serves, nor while it ends"
            raise ConfigError(f"cluster {identity}: {error}: {told}") from error
        connection.sendall(json.dumps(request).encode() + b"\n")
        for line in connection.makefile():
            told = json.loads(line)
            if "error" in told:
                raise ConfigError(told["error"])
            if "said" not in told:
                return
            yield told["said"]
    raise ConfigError(f"cluster {identity}: `conductor up` ended before the change was made")
