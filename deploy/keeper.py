"""`conductor up` as two processes: one drives Ray, one keeps what serves when Ray is gone.

    keeper   the command that was typed: holds a lifeline of every process, passes signals on
      └─ driver   starts or joins Ray, launches, restarts, scales (`up.py`, `cluster.py`)
           └─ Ray: raylet, GCS, an actor for each process

Ray ends its driver, and every actor, when its raylet dies or its GCS has been away for a minute. The
processes that serve need Ray for restarts alone, so they must not end with it: the keeper, which Ray knows
nothing of, holds their lifelines. When the driver has ended and they have not, they serve on, unsupervised;
`/status` and `conductor_process_supervised` say so. The first of them that ends cannot be started again:
then the keeper drains the others and ends with status 1, and what restarts the command (systemd, Kubernetes)
starts a whole cluster. A joined Ray has processes on other hosts too, which nobody could hold: there the
driver reports none, and all of them drain.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from base.clock import Clock
from base.lifeline import KEEPS
from deploy.held import HeldProcess

LAUNCHED = b"+"
"""The driver's report that processes are ready which shall outlive Ray."""
IN_ORDER = b"."
"""The driver's report that it ends as it was asked to. Ray ends its driver without a word."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DRAIN_S = 40.0
"""For the conductors to drain, and again for the nodes: longer than each takes itself."""


def keep(drive: Callable[[Callable[[], None]], int], folder: Path, clock: Clock) -> int:
    """Run `drive` in a process of its own; return the command's exit status.

    Args:
        drive: Runs the cluster to its end. What it is handed is to be called when processes are ready
            that shall outlive Ray.
        folder: Of the run: holds the sockets of the processes' lifelines.
    """
    reports, report = os.pipe()
    keeper_lives, keeper = os.pipe()
    driver = os.fork()
    if driver == 0:
        os.close(reports)
        os.close(keeper)
        # A terminal's Ctrl-C is the keeper's to pass on: it would come twice.
        os.setpgid(0, 0)
        threading.Thread(target=_end_with, args=(keeper_lives,), name="keeper", daemon=True).start()
        _drive(drive, report)
    os.close(report)
    os.close(keeper_lives)
    with ExitStack() as opened:
        opened.callback(os.close, keeper)
        opened.callback(os.close, reports)
        numbers = opened.enter_context(_signals())
        kept = opened.enter_context(_Kept(driver, reports, numbers, folder, clock))
        return kept.run()


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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _report(report: int, what: bytes) -> None:
    with suppress(BrokenPipeError):
        os.write(report, what)


def _end_with(keeper_lives: int) -> None:
    """Drain as on SIGTERM when the keeper has died."""
    os.read(keeper_lives, 1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor from which the numbers of signals can be read."""
    numbers, number = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {each: signal.signal(each, lambda *_: None) for each in SIGNALS}
    signal.set_wakeup_fd(number)
    try:
        yield numbers
    finally:
        signal.set_wakeup_fd(-1)
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(numbers)
        os.close(number)


class _Kept:
    """The keeper's side: the driver, and the processes whose lifelines it holds."""

    def __init__(self, driver: int, reports: int, numbers: int, folder: Path, clock: Clock) -> None:
        self._driver = driver
        self._folder = folder
        self._clock = clock
        self._processes: dict[str, HeldProcess] = {}
        self._num_signals = 0
        self._events = selectors.DefaultSelector()
        self._handle = os.pidfd_open(driver)
        self._events.register(self._handle, selectors.EVENT_READ, self._on_driver_end)
        self._events.register(reports, selectors.EVENT_READ, self._on_report)
        self._events.register(numbers, selectors.EVENT_READ, self._on_signal)
        os.set_blocking(reports, False)
        self._reports, self._numbers = reports, numbers
        self._is_reporting = True
        self._status: int | None = None
        """The driver's, when it has ended."""
        self._is_in_order = False
        """Whether the driver ends as it was asked to."""
        self._num_ended = 0

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.close()
        os.close(self._handle)
        self._events.close()

    def run(self) -> int:
        """Keep until the driver has ended, or what it leaves behind; return the command's exit status."""
        while self._status is None:
            self._turn(None)
        if not self._processes:
            return self._status
        if self._num_signals or self._is_in_order:
            self._end_all()
            return self._status
        return self._serve_on()

    def _serve_on(self) -> int:
        self._hold_all()
        names = ", ".join(sorted(self._processes))
        _say(
            f"Ray has ended. {names} serve on without it, and none is started again when it ends: then "
            "the others drain and this command ends with 1. Ctrl-C drains; `conductor up` starts anew"
        )
        self._num_ended = 0
        while not self._num_signals and not self._num_ended and self._conductors():
            self._turn(None)
        self._end_all()
        return 0 if self._num_signals else 1

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._events.select(timeout_s):
            key.data()

    def _on_driver_end(self) -> None:
        self._events.unregister(self._handle)
        _, status = os.waitpid(self._driver, 0)
        self._status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if self._is_reporting:
            self._on_report()

    def _on_report(self) -> None:
        # What it reported last is read before its end is acted on, and in the same turn perhaps.
        with suppress(BlockingIOError):
            reports = os.read(self._reports, 1 << 16)
            self._is_in_order |= IN_ORDER in reports
            if LAUNCHED in reports:
                self._hold_all()
            if not reports and self._is_reporting:
                self._is_reporting = False
                self._events.unregister(self._reports)

    def _hold_all(self) -> None:
        """Take the lifelines of those that are not held yet."""
        for path in self._folder.glob("*.sock"):
            if path.stem not in self._processes and (process := HeldProcess.at(path, KEEPS)):
                self._processes[path.stem] = process
                self._events.register(
                    process, selectors.EVENT_READ, lambda name=path.stem: self._on_end(name)
                )

    def _on_end(self, name: str) -> None:
        process = self._processes.pop(name)
        self._events.unregister(process)
        process.close()
        self._num_ended += 1
        if self._status is not None and not self._num_signals:
            _say(f"{name} has ended")

    def _on_signal(self) -> None:
        for number in os.read(self._numbers, 1 << 10):
            self._num_signals += 1
            if self._status is None:
                os.kill(self._driver, number)

    def _end_all(self) -> None:
        """Drain the conductors, who need the nodes for what they admitted; then the nodes."""
        self._end(self._conductors())
        self._end(set(self._processes))

    def _conductors(self) -> set[str]:
        return {name for name in self._processes if name.startswith("conductor")}

    def _end(self, names: set[str]) -> None:
        for number, grace_s in ((signal.SIGTERM, DRAIN_S), (signal.SIGKILL, DRAIN_S)):
            for name in names & self._processes.keys():
                self._processes[name].signal(number)
            deadline_s, num_signals = self._clock.now_s() + grace_s, self._num_signals
            while names & self._processes.keys() and self._num_signals == num_signals:
                if (left_s := deadline_s - self._clock.now_s()) <= 0:
                    break
                self._turn(left_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
