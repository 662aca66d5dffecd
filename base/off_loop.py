"""Work on a long body, off the event loop: on two threads, so that long bodies wait for each other alone.

A short body is not worth the trip to a thread and back.

The interpreter runs one thread at a time, but it changes between two calls into a library: what stands
meanwhile stands for one pass over the body, not for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

INLINE_BYTES = 1 << 16
NUM_THREADS = 2

Result = TypeVar("Result")

_threads = ThreadPoolExecutor(NUM_THREADS, "long-body")


async def on_body(raw: bytes, work: Callable[[bytes], Result]) -> Result:
    """Return what `work` makes of a body; raises what it raises."""
    if len(raw) <= INLINE_BYTES:
        return work(raw)
    return await off_loop(len(raw), partial(work, raw))


async def off_loop(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Return what `work` returns, which looks at so many bytes; raises what it raises."""
    if num_bytes <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
