"""A conductor that measures itself: how long its event loop stood, and what of that was its own doing.

    python -m bench.hostile_server --config FILE

`python -m conductor`, with a ticker on the same event loop. A tick that comes late was held up by the loop's
own work, by another thread that had the interpreter, or by the machine, which ran somebody else. The kernel
says how long the loop's thread was ready and not run; so a stall *of ours* is the lateness without that, and
never more than the processor time that all threads of the process took meanwhile.

Who connects to the socket next to the configuration and writes a line is answered with the worst since the
line before.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from base.config import ConductorProcess
from base.lifetime import Lifetime
from base.process import run_process
from conductor.__main__ import serve
from conductor.api.served_model import load_served_model

TICK_S = 0.002
SETTLED_TICKS = 3
SOCKET = "stalls.sock"
ANSWER_S = 120.0


@dataclass(slots=True)
class Stalls:
    """The worst ticks of some while, in milliseconds."""

    late_ms: float = 0.0
    """By the clock, whoever was to blame."""
    loop_ms: float = 0.0
    """Processor time of the loop's thread from one tick to the next."""
    own_ms: float = 0.0
    """Of a tick's lateness what was this process's own doing: see the module."""
    busy_ms: float = 0.0
    """Processor time of the loop's thread in all."""


class Ticker:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.worst = Stalls()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._loop = asyncio.get_running_loop()
        self._run_delay = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115
        self._read()
        self._due_s = self._at_s + TICK_S
        self._loop.call_later(TICK_S, self._tick)

    async def settle(self) -> Stalls:
        """Return the worst since the last call, after some more ticks."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((SETTLED_TICKS, done))
        await done
        worst, self.worst = self.worst, Stalls()
        return worst

    def skip(self) -> None:
        """Leave out what was done since the last tick."""
        self._read()
        self._due_s = self._at_s + TICK_S
        self.worst = Stalls()

    def _tick(self) -> None:
        thread_s, process_s, delay_s = self._thread_s, self._process_s, self._delay_s
        self._read()
        late_s = max(0.0, self._at_s - self._due_s)
        loop_s = self._thread_s - thread_s
        own_s = min(late_s - (self._delay_s - delay_s), self._process_s - process_s)
        worst = self.worst
        worst.late_ms = max(worst.late_ms, late_s * 1e3)
        worst.loop_ms = max(worst.loop_ms, loop_s * 1e3)
        worst.own_ms = max(worst.own_ms, own_s * 1e3)
        worst.busy_ms += loop_s * 1e3
        self._due_s = self._at_s + TICK_S
        self._loop.call_later(TICK_S, self._tick)
        self._waiting = [(left - 1, done) for left, done in self._waiting if not _is_over(left, done)]

    def _read(self) -> None:
        self._at_s, self._thread_s, self._process_s = (
            time.monotonic(),
            time.thread_time(),
            time.process_time(),
        )
        self._run_delay.seek(0)
        self._delay_s = int(self._run_delay.read().split()[1]) / 1e9


def _is_over(left: int, done: asyncio.Future[None]) -> bool:
    if left > 1:
        return False
    if not done.done():
        done.set_result(None)
    return True


async def watched(config: ConductorProcess, lifetime: Lifetime, path: Path) -> None:
    ticker = Ticker()
    trim = ctypes.CDLL(None).malloc_trim

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            settled = await ticker.settle()
            if line == b"begin\n":
                # What was freed goes back to the kernel: its growth is then seen again.
                gc.collect()
                trim(0)
                ticker.skip()
            writer.write(json.dumps(asdict(settled)).encode() + b"\n")

    server = await asyncio.start_unix_server(answer, str(path))
    model = load_served_model(Path(config.model_path), config.served_model_name)
    try:
        await serve(config, model, lifetime)
    finally:
        server.close()


class Watch:
    """The other side: what a watched conductor says of itself, and its memory."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(str(folder / SOCKET))
        self._answers = self._socket.makefile("rb")
        self._before_kib = 0

    def begin(self) -> None:
        """Forget what was, and measure from here on."""
        self._ask(b"begin\n")
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self._before_kib = self._memory_kib("VmRSS")

    def end(self) -> tuple[Stalls, int]:
        """Return the worst stalls since `begin`, and by how many bytes memory grew at most."""
        stalls = self._ask(b"end\n")
        return stalls, max(0, self._memory_kib("VmHWM") - self._before_kib) * 1024

    def close(self) -> None:
        self._socket.close()

    def _ask(self, line: bytes) -> Stalls:
        self._socket.sendall(line)
        return Stalls(**json.loads(self._answers.readline()))

    def _memory_kib(self, kind: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(kind))


def prepare(config: ConductorProcess) -> Callable[[Lifetime], None]:
    path = Path(sys.argv[sys.argv.index("--config") + 1]).parent / SOCKET
    return lambda lifetime: uvloop.run(watched(config, lifetime, path))


def main() -> int:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    return run_process("bench.hostile_server", ConductorProcess, lambda _: "conductor", prepare)


if __name__ == "__main__":
    sys.exit(main())
