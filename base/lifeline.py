"""A lifeline: a connection to a process, which lives while anybody holds one (`lifetime.py`).

    holder                                    process
      --- SUPERVISES or KEEPS ------------------>
      <-- its line of `ready` --------------------    to who supervises
      --- ASKS --------------------------------->
      <-- ANSWERS --------------------------------    by its event loop: a process that hangs does not

The socket is a file in the process's own folder, which only its user may open.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from base.private import FILE_MODE

SUPERVISES = b"s"
"""The first byte of a holder that starts the process again when it has ended."""
KEEPS = b"k"
"""The first byte of a holder that only wants the process to live."""
ASKS = b"?"
ANSWERS = b"!"


def listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for this user alone, in the place of whatever is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    at_path(path, listening.bind)
    path.chmod(FILE_MODE)
    listening.listen()
    return listening


def hold(path: Path, kind: bytes) -> socket.socket | None:
    """Return a lifeline of the process whose socket is at `path`; None: there is no such process.

    Args:
        kind: `SUPERVISES` or `KEEPS`.

    Raises:
        OSError: nobody can know whether there is one: no descriptor is free, or the file is another user's.
    """
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        at_path(path, lifeline.connect)
        lifeline.sendall(kind)
    except (FileNotFoundError, ConnectionError):  # no file, or a file of a process that has ended
        lifeline.close()
        return None
    except OSError:
        lifeline.close()
        raise
    return lifeline


def at_path(path: Path, act: Callable[[str], None]) -> None:
    """Bind or connect to `path`, which may be longer than the 107 bytes that a socket's address takes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        act(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
