"""Writes decisions and their outcomes to a file, as lines of `placing/decision_lines.py`.

A file is full at `max_bytes`. It is then renamed to PATH.1, in place of the one before, and a
new one begins: a log takes twice `max_bytes` at most, whatever happens. Lines are written by
the event loop into the page cache, some 5 us each; a disk that refuses them ends the log,
with one line in the conductor's own log, and never a request.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, TextIO

from base.errors import ConfigError
from base.logs import event
from base.private import private_file
from base.request import RequestId
from conductor.placing.decision_lines import Shared, decision_to, line_of, outcome_to, shared_to
from conductor.placing.decisions import Actual, Decision

log = logging.getLogger(__name__)


class DecisionLog:
    """Writes one file. Owned by the event loop."""

    def __init__(self, path: Path, shared: Shared, max_bytes: int) -> None:
        """Begin a new file; one that is there from before becomes PATH.1.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = path
        self._first_line = line_of(shared_to(shared))
        self._max_bytes = max_bytes
        self._file: TextIO | None = None
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"scheduler.decision_log: {error}") from error

    def decision(self, made: Decision) -> None:
        self._write(decision_to(made))

    def outcome(self, request_id: RequestId, actual: Actual) -> None:
        self._write(outcome_to(request_id, actual))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self.close()
        if self._path.exists():
            os.replace(self._path, f"{self._path}.1")
        # a line at a time: whoever follows the file sees whole decisions
        self._file = private_file(self._path, "w", buffering=1)
        self._num_bytes = self._file.write(self._first_line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            if self._num_bytes >= self._max_bytes:
                self._begin()
            self._num_bytes += self._file.write(line_of(line))
        except OSError as error:
            event(log, "decision log ended", level=logging.WARNING, path=self._path, reason=error)
            self._file = None
