"""Checksums of whole blocks, computed beside the event loop.

A long prompt is hundreds of megabytes, and the event loop has tokens to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from base.checksum import checksum
from engine.paged_cache import PagedCache


async def block_sums(cache: PagedCache, block_ids: Sequence[int]) -> list[int]:
    """Return the checksum of each block. The caller holds them meanwhile."""
    return await asyncio.to_thread(_sums, cache, list(block_ids))


def _sums(cache: PagedCache, block_ids: list[int]) -> list[int]:
    return [checksum(cache.block_bytes_view(block_id)) for block_id in block_ids]
