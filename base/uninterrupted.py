"""Waiting for what must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(work: Awaitable[T]) -> T:
    """Await `work` to its end, whoever cancels meanwhile; the cancellation then takes effect.

    For clean-up that memory safety hangs on. `work` must be bounded by itself.
    """
    done = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is None:
            return done.result()
        if not done.cancelled():
            done.exception()  # seen: else the loop logs one that nobody asked for
        raise cancelled
    finally:
        del work, done, cancelled  # they hold the error, whose traceback holds this frame
