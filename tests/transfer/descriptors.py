"""File descriptors of this process: what tests of leaks count."""

import gc
import os
from contextlib import suppress

OTHERS = ("socket:", "anon_inode:[event")
"""Kinds that threads of libraries (gRPC's, Redis') open and close whenever they like; memory has none."""


def descriptors() -> list[str]:
    """Return those of files, pipes and processes, without those of garbage."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which the folder is read
            kind = os.readlink(f"/proc/self/fd/{name}")
            if not kind.startswith(OTHERS):
                found.append(name)
    return sorted(found)
