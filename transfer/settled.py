"""Waiting for work that cannot be dropped half-way, under cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def settled(work: asyncio.Future[None], cancel: Callable[[], None]) -> None:
    """Return or raise as `work` does, and never before it has ended.

    Cancelled, it calls `cancel`, waits for the end all the same, and only then lets the
    cancellation through: `work` holds memory that the caller is about to reuse.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancel()
            cancelled = error
    if cancelled is not None:
        # Read, or the loop complains about an exception nobody looked at.
        work.exception()
        raise cancelled
    work.result()
