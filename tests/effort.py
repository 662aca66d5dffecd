"""What a piece of work costs, in counts that a busy machine does not change.

Lines of Python that ran on this thread, and the most bytes that it held at once. Work inside a C
library is linear in its input where the input is bounded, so these two find what grows without bound:
a loop over what a stranger sent, and a list of it. How long the same work takes is a matter of bench/.
"""

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Effort:
    """What ran in the body of `counting`; `peak_bytes` is there after its end."""

    lines: int = 0
    peak_bytes: int = 0


@contextmanager
def counting() -> Iterator[Effort]:
    """Count what this thread does, in functions that are called in the body and in what those call."""
    effort, before = Effort(), sys.gettrace()

    def trace(frame: FrameType, kind: str, argument: object) -> object:
        effort.lines += kind == "line"
        return trace

    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield effort
    finally:
        sys.settrace(before)
        effort.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
