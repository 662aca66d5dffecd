"""Finding every process that a test's command started, however deep and whoever adopted it; ports for them.

Each run carries a mark in its environment, which children inherit: Ray's, and ours.
"""

import contextlib
import os
import random
import select
import socket
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MARK = "CONDUCTOR_TEST_RUN"
NUM_SHARES = 16
"""Parts of the free ports; as many workers have one alone."""
returned_ports: set[int] = set()


def marked_environment(**more: str) -> dict[str, str]:
    """An environment with a mark of its own, in which our packages can be imported."""
    here = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**here, "PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: uuid.uuid4().hex, **more}


def marked_pids(environment: dict[str, str]) -> dict[int, str]:
    """Living processes (no zombies) that carry the mark, with their command lines."""
    wanted = f"{MARK}={environment[MARK]}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def wait_all_gone(environment: dict[str, str], timeout_s: float) -> dict[int, str]:
    """Wait until no marked process is left; return those that are, after `timeout_s`."""
    while left := marked_pids(environment):
        # What they began meanwhile is looked for again.
        if not all([wait_gone(pid, timeout_s) for pid in left]):
            return marked_pids(environment)
    return {}


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Block until a process that need not be our child has ended; False after `timeout_s`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody has, of those that neither the kernel nor Ray gives to anybody.

    None is returned twice: who asked before may not listen yet. Each of xdist's workers has ports of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    free: list[int] = []
    while len(free) < count:
        port = random.SystemRandom().randrange(20_000 + worker % NUM_SHARES, 32_000, NUM_SHARES)
        if port not in returned_ports:
            returned_ports.add(port)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                free.append(port)
    return free


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Where processes listen for TCP: hosts, in the kernel's hexadecimal, and ports."""
    return [(host, port) for host, port, state in _sockets(pids, ("tcp", "tcp6")) if state == "0A"]


def receiving(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Where processes take datagrams from anybody, as `listening`."""
    return [(host, port) for host, port, state in _sockets(pids, ("udp", "udp6")) if state == "07"]


def _sockets(pids: Iterable[int], kinds: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    for kind in kinds:
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if inode in inodes:
                host, _, port = local.partition(":")
                yield host, int(port, 16), state


assert sys.platform == "linux", "these tests read /proc"
