"""One process of the cluster: started or found, watched, restarted, drained.

    STARTING --ready--> RUNNING --exit, or hung--> (backoff) --> STARTING
        |                  |
        +-exit, never once ready--> FAILED
        +------------------+--drain--> STOPPED

The protocol is small, so that any program can stand in for the process:

* It is started as `COMMAND... --config FILE --lifeline SOCKET`, FILE being its configuration as JSON.
* It prints one JSON line on standard output when it is ready: `{"event": "ready", ...}`.
* It logs to standard error, which goes to a file.
* SIGTERM drains it.
* Its standard input is a pipe. End of file there means that its supervisor is gone, and the process ends,
  unless it listens at SOCKET (`base/lifeline.py`): then it lives while anybody holds its lifeline.

So a process outlives its supervisor. The one that Ray starts in the dead one's place, on the same host,
finds SOCKET answering and adopts the process: no request notices. What a process found out (the ports that
were free) is written into FILE, under the same keys: one that has to be started again is where clients and
nodes found it.

Ray may start a supervisor in the place of one that lives. The newest has the process: it writes its name into
NAME.owner, whose lock a supervisor holds while it finds or starts the process, until that is ready. An older
one reads there that it starts nothing any more.

The supervisor asks the process's event loop every second whether it goes round, and kills a process that
runs and has answered nothing for `HANG_S`: one that hangs serves nobody and holds its ports. A process that
somebody stopped (SIGSTOP, a debugger) is given `STOPPED_S`.

Where the spec asks for one, a spare stands by: the same command with `--spare`, which has imported and read
what it can and waits for one byte on its standard input. It takes the place of the process that ends,
without seconds of imports. It is started a while after `ready`, because at the start it would take processor
time from the process; one that ends is noticed, and another is started, each time later. Weighed and left: a
parent that imports and forks, whose own end would have to be the child's.

A process that was never ready is not restarted: what is wrong then is its configuration
or the machine, and the last lines of its log say what. One that was ready, which NAME.ready remembers, is
always restarted, also when that fails for want of memory, descriptors or space on the disk. One that was
drained leaves no socket.

This file knows nothing of Ray: `launch.py` wraps the class into an actor. Hence threads and blocking calls:
an actor's calls each have a thread.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from base.clock import Clock
from base.lifeline import SUPERVISES
from base.private import FILE_MODE, make_private, private_file
from deploy.held import HeldProcess

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
STEADY_S = 30.0
"""A process that ran this long has not failed at its start: the next one is started at once."""

SPARE_FLAG = "--spare"
SPARE_AFTER_S = 5.0
"""The wait for a spare, in which nodes attach and what waited is served first."""
LONGEST_SPARE_AFTER_S = 600.0
"""The longest wait for the next of spares that end by themselves: it is doubled each time."""

HANG_S = 30.0
"""The longest that a process which runs and answers nothing is waited for."""
STOPPED_S = 120.0
"""The longest that a process which is stopped is waited for: by SIGSTOP, or in a debugger."""
ASK_EVERY_S = 1.0
QUESTIONS = 4
"""Fewest questions left unanswered by a process that hangs: after a pause of the whole machine it answers."""

KILL_GRACE_S = 3.0
"""Time for SIGKILL and the kernel, from SIGTERM's deadline on."""

LOG_TAIL_LINES = 30

Seen: TypeAlias = tuple[str, int]
"""A supervisor, and how many of its events somebody has seen. Ray may have started another in the place of
the one that was asked before, and that one may have had its first ones meanwhile."""
NOTHING_SEEN: Seen = ("", 0)
MAX_EVENTS = 1000
"""The most events of one supervisor that are remembered."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Specification of a process, in plain values: it travels to the host that starts it."""

    name: str
    """The name of the process, its configuration file and its log: conductor, prefill-0."""
    command: tuple[str, ...]
    config: dict[str, Any]
    environment: dict[str, str]
    folder: str
    """Absolute; made on the host that needs it."""
    ready_timeout_s: float = 300.0
    spare_after_s: float | None = None
    """The wait from `ready` until a spare is started; None: there is none."""


class _SupersededError(Exception):
    """A newer supervisor has the process."""


class Supervisor:
    """Holds one process from its start to its end."""

    def __init__(self, spec: ProcessSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._folder = Path(spec.folder)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._process: HeldProcess | None = None
        self._spare: subprocess.Popen[str] | None = None
        self._spare_timer: threading.Timer | None = None
        self._spare_after_s = spec.spare_after_s
        self._ready: dict[str, Any] | None = None
        self._failed = ""
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._life = secrets.token_hex(8)
        self._is_owner = False
        self._config_path, self._lifeline_path, self.log_path, self._owner_path, self._ready_path = (
            self._folder / f"{spec.name}.{kind}" for kind in ("json", "sock", "log", "owner", "ready")
        )
        make_private(self._folder)
        self._thread = threading.Thread(target=self._supervise, name=spec.name, daemon=True)
        self._thread.start()

    @property
    def _was_ready(self) -> bool:
        """Whether the process was ever ready, under an earlier supervisor perhaps."""
        return self._ready_path.exists()

    def wait_ready(self) -> dict[str, Any]:
        """Block until the process is ready; return what it said.

        Raises:
            RuntimeError: it ended, or was not ready in time; the message holds the end of its log.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._ready is not None or self._failed or self._stopping.is_set(),
                self._spec.ready_timeout_s,
            )
            if self._ready is not None:
                return self._ready
            problem = self._failed or ("it was stopped" if done else "it is not ready in time")
        raise RuntimeError(f"{self._spec.name}: {problem}; the end of {self.log_path}:\n{self.log_tail()}")

    def wait_event(self, seen: Seen) -> tuple[Seen, dict[str, Any]]:
        """Block until something happens after what was `seen`; return what is seen then, and it.

        Keys: `event` (ready, adopted, hung, exited, failed, stopped, spare exited), `name`, and details.
        """
        life, count = seen
        with self._changed:
            if life != self._life:
                count = 0
            self._changed.wait_for(lambda: self._num_events > count)
            forgotten = self._num_events - len(self._events)
            index = max(count - forgotten, 0)
            return (self._life, forgotten + index + 1), self._events[index]

    def pid(self) -> int | None:
        """Return the process's id on its host, None between two of them."""
        with self._changed:
            process = self._process
            return process.pid if process is not None and not process.has_ended(0.0) else None

    def wait_spare(self) -> int:
        """Block until a spare stands by; return its process's id."""
        with self._changed:
            self._changed.wait_for(lambda: self._spare is not None)
            assert self._spare is not None
            return self._spare.pid

    def drain(self, grace_s: float) -> None:
        """Ask the process to finish what it has, and end it after `grace_s`. Idempotent."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        self._end_spare()
        self._signal(signal.SIGTERM)
        self._thread.join(grace_s)
        self._signal(signal.SIGKILL)
        self._thread.join(KILL_GRACE_S)

    def log_tail(self) -> str:
        """Return the last lines that the process logged."""
        try:
            with self.log_path.open(errors="replace") as log:
                return "".join(deque(log, maxlen=LOG_TAIL_LINES)).rstrip()
        except FileNotFoundError:
            return ""

    def _signal(self, number: signal.Signals) -> None:
        with self._changed:
            if self._process is not None:
                self._process.signal(number)

    def _supervise(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_at_s = self._clock.now_s()
            try:
                status = self._run_once()
                problem = {}
            except _SupersededError:
                self._end_spare()
                self._fail("another supervisor has its process")
                return
            except OSError as error:  # there is no such program, or no memory for it
                if not self._was_ready:
                    self._fail(str(error))
                    return
                status, problem = None, {"problem": str(error)}
            if self._stopping.is_set():
                self._lifeline_path.unlink(missing_ok=True)
                self._report("stopped", status=status)
                return
            if not self._was_ready:
                self._fail(f"it ended with status {status} before it was ready")
                return
            if self._clock.now_s() - started_at_s >= STEADY_S:
                backoff_s = 0.0
            self._report("exited", status=status, restart_in_s=backoff_s, **problem)
            self._stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S) or FIRST_BACKOFF_S

    def _fail(self, problem: str) -> None:
        with self._changed:
            self._failed = problem
        self._report("failed", problem=problem)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the right to find or to start the process; raises _SupersededError if a newer one had it."""
        with private_file(self._owner_path, "a") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            if not self._is_owner:
                with self._owner_path.open("r+") as name:  # in the place of another's: no disk is too full
                    name.write(self._life)
                self._is_owner = True
            if self._owner_path.read_text() != self._life:
                raise _SupersededError
            yield

    def _run_once(self) -> int | None:
        """Find or start the process, and watch it to its end; return its exit status."""
        with private_file(self.log_path, "a") as log, ExitStack() as turn:
            turn.enter_context(self._turn())
            found = HeldProcess.at(self._lifeline_path, SUPERVISES)
            with self._changed:
                if self._stopping.is_set() and found is None:
                    return 0
                self._process = process = found or self._begun(log.fileno())
                if self._stopping.is_set():
                    process.signal(signal.SIGTERM)  # the drain came before it was found
            try:
                if process.child is None:
                    self._adopt(process)
                else:
                    self._read(process, process.child, log)
                if process.has_lifeline:
                    turn.close()
                    self._watch(process)
            except OSError:  # no space for its configuration or its log
                process.signal(signal.SIGKILL)
                raise
            finally:
                process.has_ended(None)
                status = process.status()
                with self._changed:
                    self._process = self._ready = None
                    process.close()
        return status

    def _begun(self, log: int) -> HeldProcess:
        if not self._was_ready:
            self._write_config(self._spec.config)
        child = self._spare_begun() or self._start(log)
        return HeldProcess(child.pid, child)

    def _adopt(self, process: HeldProcess) -> None:
        """Wait for what a process that was found is reached by; kill it if it says nothing."""
        silence = _Silence(self._clock)
        while process.is_hearing:
            if line := process.answer(ASK_EVERY_S):
                self._take_ready(json.loads(line))
                self._report("adopted", pid=process.pid)
                return
            if process.is_hearing:
                self._judge(process, silence, line)

    def _read(self, process: HeldProcess, child: subprocess.Popen[str], log: TextIO) -> None:
        """Pass on what a child says, until it is ready and held by its lifeline, or has ended."""
        deadline = threading.Timer(self._spec.ready_timeout_s, self._end_unready, (process,))
        deadline.daemon = True
        deadline.start()
        assert child.stdout is not None
        for line in child.stdout:
            said = _ready_line(line)
            if said is None:
                log.write(line)
                log.flush()
                continue
            deadline.cancel()
            process.supervise_by(self._lifeline_path)
            self._take_ready(said)
            self._report("ready", **{key: value for key, value in said.items() if key != "event"})
            if process.has_lifeline:
                break
        deadline.cancel()

    def _end_unready(self, process: HeldProcess) -> None:
        """Kill a process that was ready once, was started again, and has not been ready in time."""
        with self._changed:
            if self._process is process and self._ready is None and self._was_ready:
                process.signal(signal.SIGKILL)

    def _watch(self, process: HeldProcess) -> None:
        """Ask a process whether its event loop goes round until it has ended; kill one that hangs.

        One that has closed its lifeline is ending: it hangs if that takes as long.
        """
        silence = _Silence(self._clock)
        process.ask()
        while not process.has_ended(ASK_EVERY_S):
            self._judge(process, silence, process.answer(0.0))
            process.ask()

    def _judge(self, process: HeldProcess, silence: _Silence, answer: bytes) -> None:
        if silence.is_hang_after(answer, process.is_stopped()):
            self._report("hung", pid=process.pid)
            process.signal(signal.SIGKILL)
            process.has_ended(None)

    def _spare_begun(self) -> subprocess.Popen[str] | None:
        """Let the spare be the process; None if there is none."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        assert spare.stdin is not None
        try:
            os.write(spare.stdin.fileno(), b"\n")
        except BrokenPipeError:  # it was killed too
            with spare:
                return None
        return spare

    def _end_spare(self) -> None:
        with self._changed:
            spare = self._spare
        if spare is not None:
            with spare:
                spare.kill()

    def _start_spare_later(self) -> None:
        if self._spare_after_s is not None:
            self._spare_timer = threading.Timer(self._spare_after_s, self._start_spare)
            self._spare_timer.daemon = True
            self._spare_timer.start()

    def _start_spare(self) -> None:
        with self._changed, private_file(self.log_path, "a") as log:
            if self._ready is None or self._spare is not None or self._stopping.is_set():
                return
            self._spare = spare = self._start(log.fileno(), SPARE_FLAG)
            self._changed.notify_all()
        threading.Thread(target=self._watch_spare, args=(spare,), daemon=True).start()

    def _watch_spare(self, spare: subprocess.Popen[str]) -> None:
        """Wait for the end of a process that began as a spare; start another if it still was one."""
        status = spare.wait()
        with self._changed:
            if self._spare is not spare or self._stopping.is_set():
                return
            self._spare = None
        spare.communicate()  # closes its pipes
        assert self._spare_after_s is not None
        self._spare_after_s = min(2 * self._spare_after_s, LONGEST_SPARE_AFTER_S)
        self._report("spare exited", status=status, restart_in_s=self._spare_after_s)
        self._start_spare_later()

    def _start(self, log: int, *flags: str) -> subprocess.Popen[str]:
        files = ("--config", str(self._config_path), "--lifeline", str(self._lifeline_path))
        command = [*self._spec.command, *files, *flags]
        # Its own session: a terminal's Ctrl-C is the launcher's to answer, by a drain.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **self._spec.environment},
            start_new_session=True,
        )

    def _take_ready(self, said: dict[str, Any]) -> None:
        self._write_config(_pinned(self._spec.config, said))
        self._ready_path.touch(FILE_MODE)
        with self._changed:
            self._ready = said
            self._spare_after_s = self._spec.spare_after_s
        self._start_spare_later()

    def _write_config(self, config: dict[str, Any]) -> None:
        # Renamed into place: a supervisor killed half-way leaves the file whole.
        text = json.dumps(config, indent=1)
        if self._was_ready and self._config_path.read_text() == text:
            return  # a disk that is full now shall not end a process that is where it was
        draft = self._config_path.with_suffix(".draft")
        with private_file(draft, "w") as file:
            file.write(text)
        draft.replace(self._config_path)

    def _report(self, what: str, **details: Any) -> None:
        with self._changed:
            self._events.append({"event": what, "name": self._spec.name, **details})
            self._num_events += 1
            self._changed.notify_all()


class _Silence:
    """How long a process has left questions unanswered, in all and while it ran."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = self._ran_since_s = clock.now_s()
        self._num_unanswered = 0

    def is_hang_after(self, answer: bytes, is_stopped: bool) -> bool:
        """Count an answer, or a question without one (empty); return whether the process hangs."""
        now_s = self._clock.now_s()
        if answer:
            self._since_s = self._ran_since_s = now_s
            self._num_unanswered = 0
            return False
        self._num_unanswered += 1
        if is_stopped:
            self._ran_since_s = now_s
        is_over = now_s - self._ran_since_s >= HANG_S or now_s - self._since_s >= STOPPED_S
        return is_over and self._num_unanswered >= QUESTIONS


def _ready_line(line: str) -> dict[str, Any] | None:
    """Return what a process says when it is ready; None: the line is another."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and said.get("event") == "ready" else None


def _pinned(config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the values the process announced, wherever it has those keys."""
    return {
        key: _pinned(value, said) if isinstance(value, dict) else said.get(key, value)
        for key, value in config.items()
    }
