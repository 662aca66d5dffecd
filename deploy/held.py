"""A process that is held: started here, or found running by its lifeline; signalled and waited for alike.

A process that was started here is our child and has an exit status. One whose supervisor died is
another's child, or nobody's: its end is seen all the same, by a handle of the kernel (pidfd), which names
that very process and never one that got its number later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
from pathlib import Path

from base.lifeline import ASKS, KEEPS, SUPERVISES, hold

PEER_CREDENTIALS = struct.Struct("3i")
"""The process, user and group that the kernel names for SO_PEERCRED."""


class HeldProcess:
    """One process from the time that somebody holds it."""

    def __init__(
        self, pid: int, child: subprocess.Popen[str] | None = None, lifeline: socket.socket | None = None
    ) -> None:
        """Begin to hold a process; raises ProcessLookupError if it has ended, and is not a child."""
        self._handle = os.pidfd_open(pid)
        self.pid = pid
        self.child = child
        self._lifeline = lifeline
        self.is_hearing = lifeline is not None
        """Whether the process answers when it is asked: it has a lifeline, and has not closed it."""

    @property
    def has_lifeline(self) -> bool:
        """Whether we took the process's lifeline, though it may have closed it since."""
        return self._lifeline is not None

    @classmethod
    def at(cls, path: Path, kind: bytes) -> HeldProcess | None:
        """Return the process whose lifeline is at `path`, held by us; None: there is none.

        Raises:
            OSError: nobody can know whether there is one: no descriptor is free.
        """
        lifeline = hold(path, kind)
        if lifeline is None:
            return None
        credentials = lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        try:
            held = cls(PEER_CREDENTIALS.unpack(credentials)[0], None, lifeline)
        except OSError as error:
            lifeline.close()
            if isinstance(error, ProcessLookupError):
                return None
            raise
        if _is_closed(lifeline):  # it ended, and the handle may name whoever has its number now
            held.close()
            return None
        return held

    def supervise_by(self, path: Path) -> None:
        """Take the lifeline of a child of ours, if it has one."""
        self._lifeline = hold(path, SUPERVISES)
        self.is_hearing = self.has_lifeline

    def fileno(self) -> int:
        """Return the handle of the process, which becomes readable when it has ended."""
        return self._handle

    def has_ended(self, timeout_s: float | None) -> bool:
        """Wait for the process's end, `timeout_s` at most; return whether it has come."""
        ends = select.poll()
        ends.register(self._handle, select.POLLIN)
        return bool(ends.poll(None if timeout_s is None else 1000 * timeout_s))

    def status(self) -> int | None:
        """Return the exit status of a process that has ended; None: it is not our child's."""
        return self.child.wait() if self.child is not None else None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped: by a signal, or by who traces it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # it has ended
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def ask(self) -> None:
        """Ask the process's event loop whether it goes round."""
        if self._lifeline is not None and self.is_hearing:
            self._lifeline.settimeout(0.0)
            # Full: it has not read for thousands of questions; or it is ending.
            with contextlib.suppress(OSError):
                self._lifeline.send(ASKS)

    def answer(self, timeout_s: float) -> bytes:
        """Return what the process has answered; empty: nothing in time."""
        if self._lifeline is None or not self.is_hearing:
            return b""
        self._lifeline.settimeout(timeout_s)
        try:
            said = self._lifeline.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return b""
        except OSError:
            said = b""
        self.is_hearing = bool(said)
        return said

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Hold the process no more, and close what is ours of it."""
        os.close(self._handle)
        if self._lifeline is not None:
            self._lifeline.close()
        for pipe in (self.child.stdin, self.child.stdout) if self.child is not None else ():
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def end_at(path: Path, grace_s: float) -> None:
    """End the process whose lifeline is at `path`, if there is one: SIGTERM, and SIGKILL after `grace_s`."""
    if (process := HeldProcess.at(path, KEEPS)) is not None:
        with contextlib.closing(process):
            process.signal(signal.SIGTERM)
            if not process.has_ended(grace_s):
                process.signal(signal.SIGKILL)
    path.unlink(missing_ok=True)


def _is_closed(lifeline: socket.socket) -> bool:
    """Return whether the process at the other end has closed it, or has ended."""
    try:
        return not lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
