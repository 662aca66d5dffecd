"""Ending whatever a command's processes leave behind, however deep it was started and whoever died before it.

A process whose parent has died becomes the child of its nearest ancestor that asked the kernel for that (a
child subreaper), else of the machine's first process, and is then nobody's. So the command asks, and what is
left below it when it ends is a child of its own sooner or later: no search by name, and nothing of others.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

from deploy.held import HeldProcess

PR_SET_CHILD_SUBREAPER = 36
"""The number of the option in Linux's `prctl`."""
KILLED_S = 10.0
"""The longest that one process is waited for after SIGKILL: in a device's driver it may never end."""


def adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own, from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0))) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def children() -> set[int]:
    """Return the children of this process, zombies too."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_child(entry)}


def _is_child(entry: Path) -> bool:
    try:
        _, parent, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return False
    return int(parent) == os.getpid()


def end_children(spared: set[int]) -> None:
    """Send SIGKILL to every child but `spared`, and to what becomes a child thereby, until none is left.

    Nobody else in this process may wait for children meanwhile: then no number is another process's.
    """
    spared = set(spared)
    while found := children() - spared:
        processes = [HeldProcess(pid) for pid in found]
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            with process:
                if process.has_ended(KILLED_S):
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, 0)
                else:
                    spared.add(process.pid)
