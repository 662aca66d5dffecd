"""What the Messenger is measured against: a bare socket, memcpy, Mooncake's wheel.

Each is a `Rival`: `run(block, places)` returns the seconds of each transfer of as many blocks
as it has places for. All of them write from memory to memory and wait for an acknowledgement,
as our batches do.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

_DRIVER = Path(__file__).with_name("mooncake_driver.py")
_LENGTH = struct.Struct("<Q")


Places = tuple[Sequence[int], Sequence[int]]
"""Where the blocks of a batch lie: offsets in the source and in the target."""


class Rival(Protocol):
    """Something that moves bytes and is timed."""

    def run(self, block: int, places: Sequence[Places]) -> list[float]: ...


def filled_memory(num_bytes: int) -> mmap.mmap:
    """Return memory whose pages are there."""
    memory = mmap.mmap(-1, num_bytes)
    memory.write(b"\1" * num_bytes)
    return memory


class Memcpy:
    """One thread's memmove between two buffers of this process, block by block."""

    def __init__(self, num_bytes: int) -> None:
        self._source = filled_memory(num_bytes)
        self._target = filled_memory(num_bytes)

    def run(self, block: int, places: Sequence[Places]) -> list[float]:
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._source))
        target = ctypes.addressof(ctypes.c_char.from_buffer(self._target))
        memmove, elapsed_s = ctypes.memmove, []
        for sources, targets in places:
            begun_s = time.perf_counter()
            for source_at, target_at in zip(sources, targets, strict=True):
                memmove(target + target_at, source + source_at, block)
            elapsed_s.append(time.perf_counter() - begun_s)
        return elapsed_s


def serve_bare_socket(listener: socket.socket, num_bytes: int) -> None:
    """Receive into one buffer and acknowledge with a byte, until the peer leaves."""
    memory = memoryview(filled_memory(num_bytes))
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(_LENGTH.size)
    while sock.recv_into(head, _LENGTH.size, socket.MSG_WAITALL):
        (left,) = _LENGTH.unpack(head)
        at = 0
        while at < left:
            at += sock.recv_into(memory[at:left])
        sock.sendall(b"\1")


class BareSocket:
    """One blocking connection: length, the first bytes there are, one byte back. No addressing, no checks."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._memory = memoryview(filled_memory(num_bytes))
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, block: int, places: Sequence[Places]) -> list[float]:
        elapsed_s = []
        for sources, _ in places:
            begun_s = time.perf_counter()
            self._sock.sendall(_LENGTH.pack(block * len(sources)))
            self._sock.sendall(self._memory[: block * len(sources)])
            self._sock.recv(1)
            elapsed_s.append(time.perf_counter() - begun_s)
        return elapsed_s


class Mooncake:
    """Two processes with Mooncake's transfer engine over tcp, defaults, P2P handshake."""

    def __init__(self, python: str, num_bytes: int, stack: ExitStack) -> None:
        target = stack.enter_context(piped([python, str(_DRIVER), "target", str(num_bytes)]))
        about = _answer(target)
        self._source = stack.enter_context(piped([python, str(_DRIVER), "source"]))
        self._send(f"{about['address']} {about['pointer']} {num_bytes}")
        _answer(self._source)
        stack.callback(self._source.terminate)
        stack.callback(target.terminate)

    def run(self, block: int, places: Sequence[Places]) -> list[float]:
        self._send(json.dumps([block, places]))
        return [float(each) for each in _answer(self._source)["elapsed_s"]]

    def _send(self, line: str) -> None:
        assert self._source.stdin is not None
        self._source.stdin.write(line + "\n")
        self._source.stdin.flush()


class IbWriteBw:
    """perftest's `ib_write_bw`, a C loop of one-sided writes, over the first RDMA device.

    It keeps `depth` of them under way; with 1, each is waited for before the next, as our batches are.
    """

    def __init__(self, depth: int, port: int = 18515) -> None:
        self._depth = depth
        self._port = port

    def run(self, block: int, places: Sequence[Places]) -> list[float]:
        """Return the mean time of a batch for each: the program reports no more."""
        batch, count = len(places[0][0]), len(places)
        command = ["ib_write_bw", "-d", "rxe0", "-x", "1", "-F", "--report_gbits", "-p", str(self._port)]
        command += ["-s", str(block), "-n", str(max(5, batch * count))]
        command += ["-t", str(self._depth)]
        with piped(command) as server:
            while not _listens(self._port):
                time.sleep(0.1)
            client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=True)
            server.wait()
        rows = [line.split() for line in client.stdout.splitlines() if line.split()[:1] == [str(block)]]
        gb_per_s = float(rows[0][3]) / 8
        return [block * batch / gb_per_s / 1e9] * count


def _listens(port: int) -> bool:
    """Return whether a server listens; connecting would end this one."""
    state, place = "0A", f":{port:04X}"
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(name).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[1].endswith(place) and fields[3] == state:
                return True
    return False


def piped(command: list[str]) -> subprocess.Popen[str]:
    """Start a rival that is spoken to over pipes; what it logs goes nowhere."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _answer(process: subprocess.Popen[str]) -> dict:  # type: ignore[type-arg]
    """Return the next line of JSON; the engine prints lines of its own as well."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict = json.loads(line)  # type: ignore[type-arg]
            return answer
    raise RuntimeError("mooncake's process ended")
