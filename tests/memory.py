"""Memory that a piece of work takes, without that of whatever else the process does meanwhile."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

DEEP = 40
"""Frames that are looked through for a test's own."""


def kept_bytes(make: Callable[[], Made], test_file: str) -> tuple[Made, int]:
    """Return what `make` makes, and the bytes that are held of what `test_file` had allocated.

    Threads of libraries and of clusters allocate as they like. What a test had allocated has a line of the
    test's file above it, on its stack.
    """
    tracemalloc.start(DEEP)
    try:
        made = make()
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    own = tracemalloc.Filter(True, str(Path(test_file)), all_frames=True)
    return made, sum(trace.size for trace in snapshot.filter_traces([own]).traces)
