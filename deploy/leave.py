"""`python -m deploy.leave`: this host is about to go, so what runs here finishes its requests first.

Ray ends its workers at once when a host shuts down, and ours with them. Kubernetes runs
this before that (preStop), systemd too (ExecStop). SIGTERM drains a process of ours: a node says to the
conductors that it leaves, takes nothing new, and ends when its requests have ended, after 30 s at the latest.
Its supervisor starts it again then, which takes longer than the host has left; should it attach once more, it
is lost like any other node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from base.clock import Clock, SystemClock
from deploy.cluster import Programs
from deploy.held import HeldProcess
from deploy.pools import NODE_DRAIN_S


def leave(programs: Programs, clock: Clock, grace_s: float) -> None:
    """Drain the conductors of this host and this user, then the nodes; wait `grace_s` for each half."""
    for command in (programs.conductor, programs.node):
        with ExitStack() as held:
            processes = [held.enter_context(closing(process)) for process in _running(command[1:])]
            for process in processes:
                process.signal(signal.SIGTERM)
            deadline_s = clock.now_s() + grace_s
            for process in processes:
                process.has_ended(max(deadline_s - clock.now_s(), 0.0))


def _running(arguments: tuple[str, ...]) -> Iterator[HeldProcess]:
    """Yield the processes of this user whose program was given these first arguments."""
    wanted = [argument.encode() for argument in arguments]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[1 : 1 + len(wanted)] == wanted:
                    yield HeldProcess(int(entry.name))


if __name__ == "__main__":
    leave(Programs(), SystemClock(), NODE_DRAIN_S)
