"""Files and folders that nobody but their owner reads.

Run configurations hold the passwords of `redis_url` and of other addresses, logs the words of whoever asks,
and the decision log who asked when. The mode is given when a file is made, not after it, and a file
that is there from before is changed before anything is written to it. Certificates and keys are read again
once their file has another stamp.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TextIO

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_private(folder: Path) -> None:
    """Make a folder, and missing ones above it, for its owner alone; one that is there becomes so."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE, exist_ok=True)
    folder.chmod(FOLDER_MODE)


def private_file(path: Path, mode: Literal["w", "a"], buffering: int = -1) -> TextIO:
    """Open a file to write text to it, for its owner alone."""

    def opened(name: str, flags: int) -> int:
        file = os.open(name, flags, FILE_MODE)
        os.fchmod(file, FILE_MODE)
        return file

    return open(path, mode, buffering, encoding="utf-8", opener=opened)


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced or written to, its length last; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
