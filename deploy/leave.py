"""`python -m deploy.leave`: this host is about to go, so what runs here finishes its requests first.

Ray ends its workers at once when a host's processes are told to end, and ours with them. Kubernetes runs
this before that (preStop), systemd too (ExecStop). SIGTERM drains a process of ours: a node tells the
conductors that it leaves, takes nothing new, and ends when its requests have ended, after 30 s at the latest.
Its supervisor starts it again then, which takes longer than the host has left; should it attach once more, it
is lost like any other node.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import ExitStack
from pathlib import Path

from base.clock import Clock, SystemClock
from deploy.cluster import Programs
from deploy.pools import NODE_DRAIN_S


def leave(programs: Programs, clock: Clock, grace_s: float) -> None:
    """Drain the conductors of this host and this user, then the nodes; wait `grace_s` for each half."""
    for command in (programs.conductor, programs.node):
        with ExitStack() as opened:
            ends = select.epoll()
            opened.callback(ends.close)
            num_left = 0
            for pid in _running(command[1:]):
                try:
                    handle = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                opened.callback(os.close, handle)
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                ends.register(handle, select.EPOLLIN | select.EPOLLONESHOT)
                num_left += 1
            deadline_s = clock.now_s() + grace_s
            while num_left and (left_s := deadline_s - clock.now_s()) > 0:
                num_left -= len(ends.poll(left_s))


def _running(arguments: tuple[str, ...]) -> list[int]:
    """Return the processes of this user whose program was given these first arguments."""
    wanted, found = [argument.encode() for argument in arguments], []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                told = (entry / "cmdline").read_bytes().split(b"\0")
                if told[1 : 1 + len(wanted)] == wanted:
                    found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


if __name__ == "__main__":
    leave(Programs(), SystemClock(), NODE_DRAIN_S)
