"""Checksums of whole blocks, computed beside the event loop.

A long prompt is hundreds of megabytes, and the event loop has tokens to send. On a CPU a block's sum is xxh3
of its bytes, on a GPU a kernel's (`kernels/sum_words.py`). The two differ, so nodes of both sorts do not
serve together, and their `sum_kind` says so to the conductor.

A GPU's kernel is launched by the event loop itself, in a fifth of a millisecond; a thread that launched it
would take as long and have the interpreter meanwhile. A thread waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import torch

from base.checksum import CHECKSUM_KIND, DEVICE_CHECKSUM_KIND, checksum
from base.kv_layout import KvLayout, KvPart, Spread, spread
from engine.paged_cache import PagedCache

UNSIGNED = (1 << 64) - 1

COPIED_BLOCKS = 64
"""Number of blocks copied at once where a part of each is summed: 512 MiB of blocks of 8 MiB."""


def sum_kind(cache: PagedCache) -> str:
    """Return the name of the checksum of this cache's blocks."""
    return DEVICE_CHECKSUM_KIND if cache.tensor.is_cuda else CHECKSUM_KIND


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where the blocks of one rank's cache are in whole blocks."""

    part: KvPart
    whole: KvLayout

    def of(self, part: KvPart) -> Spread:
        """Return where the words of a part, counted from the cache's first layer and head, are."""
        own = self.part
        first_layer, first_head = own.first_layer + part.first_layer, own.first_head + part.first_head
        return spread(self.whole, replace(part, first_layer=first_layer, first_head=first_head)).of_words(8)


async def block_sums(
    cache: PagedCache, block_ids: Sequence[int], part: KvPart | None = None, place: CachePlace | None = None
) -> list[int]:
    """Return the 64-bit checksum of each block. The caller holds them meanwhile, and steps that wrote to them
    have ended.

    Args:
        part: Layers and heads of the cache, counted from its first, to sum alone. On a CPU it is the sum
            of a block of a cache that has no others, on a GPU what they add to the whole block's.
        place: Where the blocks are in whole blocks, if the cache has only a part of each.
    """
    part, place = part or _all_of(cache), place or CachePlace(_all_of(cache), cache.layout)
    if not _is_summed_in_place(cache, part):
        return await asyncio.to_thread(_sums, cache, list(block_ids), part, place)
    # A stream of its own, and before the steps' kernels in line: a request waits for this.
    with torch.cuda.stream(torch.cuda.Stream(cache.tensor.device, priority=-1)):  # type: ignore[no-untyped-call]
        wait = _launched(cache.tensor, block_ids, place.of(part))
    return await asyncio.to_thread(wait)


def block_sums_in_order(
    cache: PagedCache, block_ids: Sequence[int], part: KvPart, place: CachePlace
) -> Awaitable[list[int]] | None:
    """Return the sums of what the blocks hold now, to be waited for; steps launched later write later.

    None: they cannot be had, on a CPU or of a part of blocks."""
    if not _is_summed_in_place(cache, part):
        return None
    wait = _launched(cache.tensor, block_ids, place.of(part))
    return asyncio.get_running_loop().run_in_executor(None, wait)


def _all_of(cache: PagedCache) -> KvPart:
    return KvPart(0, cache.layout.num_layers, 0, cache.layout.num_kv_heads)


def _is_summed_in_place(cache: PagedCache, part: KvPart) -> bool:
    return cache.tensor.is_cuda and part == _all_of(cache)


def _sums(cache: PagedCache, block_ids: list[int], part: KvPart, place: CachePlace) -> list[int]:
    if part == _all_of(cache):
        return [checksum(cache.block_bytes_view(block_id)) for block_id in block_ids]
    layers = slice(part.first_layer, part.first_layer + part.num_layers)
    heads = slice(part.first_head, part.first_head + part.num_heads)
    sums: list[int] = []
    for start in range(0, len(block_ids), COPIED_BLOCKS):
        some = block_ids[start : start + COPIED_BLOCKS]
        copied = cache.tensor[some, layers, :, :, heads].contiguous()
        if copied.is_cuda:
            sums += _launched(copied, range(len(some)), place.of(part))()
        else:
            sums += [checksum(block.view(-1).view(torch.uint8).numpy().data) for block in copied]
    return sums


def _launched(blocks: torch.Tensor, block_ids: Sequence[int], places: Spread) -> Callable[[], list[int]]:
    """Take the sums on the current stream; return what waits for them."""
    # Triton is 1 GB and only machines with a GPU have it.
    from engine.kernels.sum_words import sum_words  # noqa: PLC0415

    words = blocks.view(len(blocks), -1).view(torch.int64)
    with torch.cuda.device(words.device):  # a thread's own matter
        ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=True).to(words.device, non_blocking=True)
        sums = sum_words(words, ids, 0, words.shape[1], places)
        copied = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
        copied.copy_(sums, non_blocking=True)
        ended = torch.Event("cuda")
        ended.record()

    def wait() -> list[int]:
        ended.synchronize()
        return [value & UNSIGNED for value in copied.tolist()]

    return wait
