"""One line per event, `key=value`, no prompt text.

`configure` is called once, by a process's main; everything else uses the standard
`logging.getLogger(__name__)` with a fixed message and values in `extra`-free form:

    log.info("rejected", extra={"fields": {"request_id": rid, "reason": "ttft"}})

is written by `event(log, "rejected", request_id=rid, reason="ttft")`.
"""

from __future__ import annotations

import json
import logging
import os
import sys


def configure(process: str) -> None:
    """Send this process's events to standard error, each line naming `process`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def end_log() -> None:
    """Let a process's log end with the process's own last words.

    Triton, which torch imports where it is installed, lists in thirty lines more what it leaks.
    """
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def event(log: logging.Logger, message: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one event with its values as fields."""
    if log.isEnabledFor(level):
        tail = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        log.log(level, "%s %s", message, tail)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # A value from outside (a request's id, a peer's error) can make no second line and no field of its own.
    return text if text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
