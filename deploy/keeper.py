"""`conductor up` as two processes: one drives Ray, one keeps what serves when Ray is gone.

    keeper   the command that was typed: holds a lifeline of every process, passes signals on
      └─ driver   starts or joins Ray, launches, restarts, scales (`up.py`, `cluster.py`)
           └─ Ray: raylet, GCS, an actor for each process

Ray ends its driver, and every actor, when its raylet dies or its GCS has been away for a minute. The
processes that serve need Ray for restarts alone: the keeper, which Ray knows nothing of, holds their
lifelines. When the driver has ended they serve on, unsupervised; `/status` and
`conductor_process_supervised` say so. When the first of them ends, or if one was being restarted when Ray
ended, the keeper drains the others and ends with status 1, and what restarts the command (systemd,
Kubernetes) starts a whole cluster. A joined Ray has processes on other hosts too, which nobody could hold:
there the driver reports none, and all of them drain.

Whatever is left below the keeper after that is killed: agents of a Ray that lost its GCS live on for long.
A process whose parent has died becomes the child of its nearest ancestor that asked the kernel for that (a
child subreaper), else of the machine's first process. The keeper asks, so all that is left below it is a
child of its own sooner or later: no search by name, and nothing of others.

The driver has a process group of its own, in the background of a terminal, so that Ctrl-C comes once, and no
standard input, which a terminal's foreground alone may read. A terminal that hangs up drains the cluster, and
standard error that nobody reads disturbs neither process. A driver that has not ended `DRAIN_S` after the
second signal hangs in Ray, and is killed.
"""

from __future__ import annotations

import ctypes
import io
import os
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from base.clock import Clock
from base.lifeline import KEEPS
from deploy.held import HeldProcess

LAUNCHED = b"+"
"""The driver's report that processes are ready which shall outlive Ray."""
IN_ORDER = b"."
"""The driver's report that it ends as it was asked to. Ray ends its driver without a word."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals of the command: each drains, and a second ends everything at once. SIGHUP, of which a terminal
that ends may send several, is no second one, and is left ignored where it was (`nohup`)."""
INTERRUPTED = 130
"""Exit status of a command that a signal ended before it had done its work."""
PR_SET_CHILD_SUBREAPER = 36
"""The number of the option in Linux's `prctl`."""
KILLED_S = 10.0
"""The longest that one process is waited for after SIGKILL: in a device's driver it may never end."""
DRAIN_S = 40.0
"""The longest drain of the conductors, and again of the nodes: longer than each takes itself."""


def keep(drive: Callable[[Callable[[], None]], int], folder: Path, clock: Clock) -> int:
    """Run `drive` in a process of its own; return the command's exit status.

    Args:
        drive: Runs the cluster to its end. What it is handed is to be called when processes are ready
            that shall outlive Ray.
        folder: The folder of the run, which holds the sockets of the processes' lifelines.
    """
    others = _children()  # those of whoever became this command by exec
    _adopt_orphans()
    reports, report = os.pipe()
    keeper_lives, keeper = os.pipe()
    sys.stderr = _lasting(sys.stderr)
    # Blocked until both processes handle them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    driver = os.fork()
    if driver == 0:
        os.close(reports)
        os.close(keeper)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _leave_terminal()
        threading.Thread(target=_end_with, args=(keeper_lives,), name="keeper", daemon=True).start()
        _drive(drive, report)
    os.close(report)
    os.close(keeper_lives)
    # What is open and which signals are taken stay so: the command ends after this.
    status = _Keeper(driver, reports, _signals(), folder, clock).run()
    _end_children(others)
    return status


def _drive(drive: Callable[[Callable[[], None]], int], report: int) -> NoReturn:
    """Be the driver: nothing of the command is left to be done when it has ended, which is the keeper's."""
    status = 1
    try:
        status = drive(lambda: _report(report, LAUNCHED))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _report(report, IN_ORDER)
        with suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave_terminal() -> None:
    """Take signals from the keeper alone, from now on: one that comes before `drive` takes them ends it."""
    os.setpgid(0, 0)
    # What stops a process that writes to its terminal from the background, where that is set so.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    for each in (signal.SIGINT, signal.SIGTERM):
        # A Ctrl-C that came before setpgid comes from the keeper too.
        signal.signal(each, signal.SIG_IGN)
        signal.signal(each, _interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _interrupted(*_: object) -> NoReturn:
    raise SystemExit(INTERRUPTED)


class _Lasting(io.FileIO):
    """A file that takes what is written to it although nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lasting(stream: TextIO) -> TextIO:
    """Return a stream in the place of `stream` that outlives its terminal, or who reads its pipe."""
    raw = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)


def _report(report: int, what: bytes) -> None:
    with suppress(BrokenPipeError):
        os.write(report, what)


def _end_with(keeper_lives: int) -> None:
    """Drain as on SIGTERM when the keeper has died."""
    os.read(keeper_lives, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _signals() -> int:
    """Return a descriptor from which the numbers of signals can be read."""
    numbers, number = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    for each in (*SIGNALS, signal.SIGCHLD):
        if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return numbers


class _Keeper:
    """The keeper's side: the driver, and the processes whose lifelines it holds."""

    def __init__(self, driver: int, reports: int, numbers: int, folder: Path, clock: Clock) -> None:
        self._driver = driver
        self._folder = folder
        self._clock = clock
        self._processes: dict[str, HeldProcess] = {}
        self._num_signals = 0
        self._kill_at_s: float | None = None
        """When the driver is killed if it has not ended."""
        self._events = selectors.DefaultSelector()
        self._events.register(reports, selectors.EVENT_READ, self._on_report)
        self._events.register(numbers, selectors.EVENT_READ, self._on_signal)
        os.set_blocking(reports, False)
        self._reports, self._numbers = reports, numbers
        self._has_launched = False
        self._status: int | None = None
        """The driver's exit status, when it has ended."""
        self._is_in_order = False
        """Whether the driver ends as it was asked to."""
        self._ended: list[str] = []

    def run(self) -> int:
        """Keep until the driver has ended, or what it leaves behind; return the command's exit status."""
        self._on_children()
        while self._status is None:
            self._turn(self._left_s())
            if self._status is None and self._left_s() == 0:
                os.kill(self._driver, signal.SIGKILL)
                self._kill_at_s = None
        self._hold_all()
        if self._has_launched and not self._is_in_order and not self._num_signals:
            return self._serve_on()
        self._end_all()
        if self._num_signals and not self._is_in_order:
            return 0 if self._has_launched else INTERRUPTED
        return self._status

    def _serve_on(self) -> int:
        names = ", ".join(sorted(self._processes))
        # What was drained leaves no socket: `supervisor.py`.
        ready = {path.stem for path in self._folder.glob("*.sock")}
        if missing := ", ".join(sorted(ready - self._processes.keys())):
            _say(
                f"Ray has ended, and {missing} before it, which nobody starts again: "
                f"draining {names or 'nothing'}"
            )
            self._end_all()
            return 1
        _say(
            f"Ray has ended. {names} serve on without it, and none is started again when it ends: then "
            "the others drain and this command ends with 1. Ctrl-C drains; `conductor up` starts anew"
        )
        self._ended.clear()
        while self._processes and not self._num_signals and not self._ended:
            self._turn(None)
        if self._ended and not self._num_signals:
            _say(f"{', '.join(self._ended)} has ended")
        self._end_all()
        return 0 if self._num_signals else 1

    def _left_s(self) -> float | None:
        """Return how long the driver may take to end; None: until a second signal, as long as it likes."""
        return None if self._kill_at_s is None else max(self._kill_at_s - self._clock.now_s(), 0)

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._events.select(timeout_s):
            key.data()

    def _on_children(self) -> None:
        """Take exit statuses: the driver's and, as a container's first process, of what lost its parent."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._driver:
                    self._status = os.waitstatus_to_exitcode(status)
                    if self._status < 0:
                        self._status = 128 - self._status
                    self._on_report()

    def _on_report(self) -> None:
        # What it reported last is read before its end is acted on, and in the same turn perhaps.
        with suppress(BlockingIOError):
            reports = os.read(self._reports, 1 << 16)
            self._is_in_order |= IN_ORDER in reports
            if LAUNCHED in reports:
                self._has_launched = True
                self._hold_all()
            if not reports and self._reports in self._events.get_map():
                self._events.unregister(self._reports)

    def _hold_all(self) -> None:
        """Take the lifelines of those that are not held yet."""
        for path in self._folder.glob("*.sock"):
            name = path.stem
            if (held := self._processes.get(name)) is not None:
                if not held.has_ended(0.0):
                    continue
                self._on_end(name, held)
            try:
                process = HeldProcess.at(path, KEEPS)
            except OSError as error:
                _say(f"{name} is not kept if Ray ends: {error}")
                continue
            if process is not None:
                self._processes[name] = process
                self._events.register(process, selectors.EVENT_READ, partial(self._on_end, name, process))

    def _on_end(self, name: str, process: HeldProcess) -> None:
        if self._processes.get(name) is not process:
            return  # seen by `_hold_all` already
        del self._processes[name]
        self._events.unregister(process)
        process.close()
        self._ended.append(name)

    def _on_signal(self) -> None:
        for number in os.read(self._numbers, 1 << 10):
            if number == signal.SIGCHLD:
                self._on_children()
            elif number != signal.SIGHUP or not self._num_signals:
                self._num_signals += 1
                if self._num_signals == 2:
                    self._kill_at_s = self._clock.now_s() + DRAIN_S
                if self._status is None:
                    os.kill(self._driver, signal.SIGTERM if number == signal.SIGHUP else number)

    def _end_all(self) -> None:
        """Drain the conductors, who need the nodes for what they admitted; then the nodes."""
        self._end({name for name in self._processes if name.startswith("conductor")})
        self._end(set(self._processes))

    def _end(self, names: set[str]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL) if self._num_signals < 2 else (signal.SIGKILL,):
            for name in names & self._processes.keys():
                self._processes[name].signal(number)
            deadline_s, num_signals = self._clock.now_s() + DRAIN_S, self._num_signals
            while names & self._processes.keys() and self._num_signals == num_signals:
                if (left_s := deadline_s - self._clock.now_s()) <= 0:
                    break
                self._turn(left_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _adopt_orphans() -> None:
    """Become the parent of every process below this one that loses its own, from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(each) for each in (1, 0, 0, 0))) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def _children() -> set[int]:
    """Return the children of this process, zombies too."""
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_child(entry)}


def _is_child(entry: Path) -> bool:
    try:
        _, parent, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return False
    return int(parent) == os.getpid()


def _end_children(spared: set[int]) -> None:
    """Send SIGKILL to every child but `spared`, and to what becomes a child thereby, until none is left.

    Nobody else in this process may wait for children meanwhile: then no number is another process's.
    """
    spared = set(spared)
    while found := _children() - spared:
        processes = [HeldProcess(pid) for pid in found]
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            with closing(process):
                if process.has_ended(KILLED_S):
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, 0)
                else:
                    spared.add(process.pid)
