"""Other caches of KV blocks, measured by `bench/kvstore.py` in the same run as ours.

Each lives in an environment of its own, named by its Python, and answers through a pipe
(`mooncake_store_driver.py`, `lmcache_driver.py`): puts and gets one batch of blocks when called.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.transfer_rivals import piped

ROOT = Path(__file__).parent.parent

PutAndGet = Callable[[list[float], list[float]], None]
"""Adds the seconds of a put and of a get to the lists."""


@contextmanager
def mooncake_store(python: Path, block_bytes: int, num_blocks: int) -> Iterator[PutAndGet]:
    """Mooncake's master, a process that offers memory, and one that puts and gets when called."""
    port = free_port()
    driver = [str(python), str(ROOT / "bench" / "mooncake_store_driver.py")]
    with ExitStack() as stack:

        def started(*command: str) -> subprocess.Popen[str]:
            child = piped(list(command))
            stack.callback(child.wait)
            stack.callback(child.terminate)
            return child

        started(
            str(python.parent / "mooncake_master"), f"--port={port}", "--enable_http_metadata_server=false"
        )
        while not is_open(port):
            pass
        children = [
            started(*driver, role, f"127.0.0.1:{port}", str(num_bytes), str(free_port()))
            for role, num_bytes in (("storage", 4 << 30), ("client", num_blocks * block_bytes))
        ]
        for child in children:
            answer_of(child, '{"ready"')
        yield asked(children[1], block_bytes, num_blocks)


@contextmanager
def lmcache(python: Path, block_bytes: int, num_blocks: int) -> Iterator[PutAndGet]:
    """LMCache's CPU backend in a process of its own."""
    with piped([str(python), str(ROOT / "bench" / "lmcache_driver.py")]) as child:
        try:
            answer_of(child, '{"ready"')
            yield asked(child, block_bytes, num_blocks)
        finally:
            child.terminate()


def asked(child: subprocess.Popen[str], block_bytes: int, num_blocks: int) -> PutAndGet:
    """Return what makes a driver put and get one batch."""

    def put_and_get(puts: list[float], gets: list[float]) -> None:
        assert child.stdin is not None
        child.stdin.write(f"{block_bytes} {num_blocks}\n")
        child.stdin.flush()
        answer = json.loads(answer_of(child, '{"put_s"'))
        assert answer["put"] == answer["got"] == num_blocks
        puts.append(answer["put_s"])
        gets.append(answer["get_s"])

    return put_and_get


def answer_of(child: subprocess.Popen[str], opening: str) -> str:
    """Return the next line that begins so; a rival logs where it likes."""
    assert child.stdout is not None
    while not (line := child.stdout.readline()).startswith(opening):
        assert line, "the rival ended"
    return line


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_open(port: int) -> bool:
    """Return whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
