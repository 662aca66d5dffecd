"""When a process ends: on SIGTERM or SIGINT, or when its supervisor is gone.

Each process is started with a pipe as standard input. The kernel closes it when the
supervisor dies, however it dies, so nothing is left running.
"""

from __future__ import annotations

import asyncio
import signal
import sys

SUPERVISOR_GONE = "standard input closed"


async def stop_requested() -> str:
    """Wait for the process's end to be asked for; return by what."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(reason: str) -> None:
        if not stopped.done():
            stopped.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    transport, _ = await loop.connect_read_pipe(lambda: _Watch(stop), sys.stdin)
    try:
        return await stopped
    finally:
        transport.close()


class _Watch(asyncio.Protocol):
    def __init__(self, stop: object) -> None:
        self._stop = stop

    def connection_lost(self, exc: Exception | None) -> None:
        assert callable(self._stop)
        self._stop(SUPERVISOR_GONE)
