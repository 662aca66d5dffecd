"""What other work on this machine takes of its processors while a bench runs.

Benches of real nodes on a machine that is shared say something of the nodes only while they have it
to themselves. A thread notes twice a second how long all processors worked, and how long for this
process and what it started.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

import numpy as np

PERIOD_S = 0.5
PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class OthersWatch:
    """Notes in the body of a `with`, and answers after it."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._others_s: list[float] = []
        """Processors' seconds for others, up to each moment."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OthersWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def share(self, began_s: float, ended_s: float) -> float:
        """Return the share of all processors that others had between two moments of the monotonic clock."""
        taken_s = np.diff(np.interp([began_s, ended_s], self._at_s, self._others_s))[0]
        return float(taken_s / (ended_s - began_s) / (os.cpu_count() or 1))

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._others_s.append(worked_s() - own_s(os.getpid()))
            self._at_s.append(time.monotonic())


def worked_s(proc: Path = PROC) -> float:
    """Return the seconds that all processors have worked."""
    with open(proc / "stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) * TICK_S


def own_s(root: int, proc: Path = PROC) -> float:
    """Return the seconds that a process and all that came of it worked, ended children included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # after the name, which may have any characters
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return total * TICK_S
