"""File descriptors of this process: what tests of leaks count."""

import gc
import os


def descriptors() -> list[str]:
    """Return those that are open, without those of garbage, whose end would look like somebody's."""
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))
