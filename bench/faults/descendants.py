"""The processes of one cluster, found in /proc from the one that was started, and from no name alone.

A process whose parent has died is below it no more. So whatever was once seen below the first process is
remembered with all below it, and the environment carries a mark, which children inherit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "CONDUCTOR_BENCH_RUN"


@dataclass(frozen=True, slots=True)
class Process:
    """One living process."""

    pid: int
    parent: int
    started: int
    """The moment of the process's start in the kernel's ticks; with `pid` it names one process for ever."""
    command: tuple[str, ...]
    mark: str = ""

    @property
    def program(self) -> str:
        """The file name of what is run, or what the process calls itself."""
        return self.command[0].rpartition("/")[2] if self.command else ""


def living() -> list[Process]:
    """Return every process of this machine that may be looked at, but for zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += _read(entry)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def _read(entry: Path) -> list[Process]:
    state, parent, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
    if state in "ZX":
        return []
    variables = (entry / "environ").read_bytes().split(b"\0")
    marks = (each.decode() for each in variables if each.startswith(f"{MARK}=".encode()))
    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    command = tuple(word for word in words if word)
    return [
        Process(int(entry.name), int(parent), int(fields[17]), command, next(marks, "").partition("=")[2])
    ]


def below(roots: Iterable[int], processes: Iterable[Process]) -> list[Process]:
    """Return those of `processes` that descend from one of `roots`, and these themselves."""
    children: dict[int, list[Process]] = {}
    by_pid = {}
    for process in processes:
        by_pid[process.pid] = process
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    pending = [by_pid[pid] for pid in roots if pid in by_pid]
    while pending:
        process = pending.pop()
        if process.pid not in found:
            found[process.pid] = process
            pending += children.get(process.pid, [])
    return list(found.values())


class Family:
    """A process, and everything that was ever seen below it or carries its mark."""

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = mark
        self._seen: set[tuple[int, int]] = set()

    def look(self) -> list[Process]:
        """Return those that live now, the root among them."""
        return self.of(living())

    def of(self, processes: list[Process]) -> list[Process]:
        """Return those of `processes` that belong to it, and remember them."""
        known = [
            process.pid
            for process in processes
            if (process.pid, process.started) in self._seen or process.mark == self._mark
        ]
        roots = known if self._seen else [*known, self._root]
        members = below(roots, processes)
        self._seen |= {(process.pid, process.started) for process in members}
        return members


def marked(mark: str) -> dict[str, str]:
    """Return an environment for the first process: this one's, with the mark, and no Ray to join."""
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, MARK: mark}
