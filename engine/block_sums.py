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
from base.kv_layout import KvLayout, KvPart, Spread, all_of, part_columns, spreads
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

    def of(self, part: KvPart) -> tuple[Spread, ...]:
        """Return where the words of a part, counted from the cache's first layer and head, are."""
        own = self.part
        first_layer, first_head = own.first_layer + part.first_layer, own.first_head + part.first_head
        in_whole = replace(part, first_layer=first_layer, first_head=first_head)
        return tuple(each.of_words(8) for each in spreads(self.whole, in_whole))


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
    everything = all_of(cache.layout)
    part, place = part or everything, place or CachePlace(everything, cache.layout)
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


def _is_summed_in_place(cache: PagedCache, part: KvPart) -> bool:
    return cache.tensor.is_cuda and part == all_of(cache.layout)


def _sums(cache: PagedCache, block_ids: list[int], part: KvPart, place: CachePlace) -> list[int]:
    if part == all_of(cache.layout):
        return [checksum(cache.block_bytes_view(block_id)) for block_id in block_ids]
    sums: list[int] = []
    for start in range(0, len(block_ids), COPIED_BLOCKS):
        some = block_ids[start : start + COPIED_BLOCKS]
        columns = part_columns(cache.tensor[some], cache.layout, part)
        copied = torch.cat(columns, dim=1) if columns else cache.tensor.new_empty(len(some), 0)
        if copied.is_cuda:
            sums += _launched(copied, range(len(some)), place.of(part))()
        else:
            sums += [checksum(block.numpy().data) for block in copied]
    return sums


def _launched(
    blocks: torch.Tensor, block_ids: Sequence[int], places: Sequence[Spread]
) -> Callable[[], list[int]]:
    """Take the sums on the current stream; return what waits for them."""
    # Triton is 1 GB and only machines with a GPU have it.
    from engine.kernels.sum_words import sum_words  # noqa: PLC0415

    words = blocks.view(torch.int64)
    with torch.cuda.device(words.device):  # a thread's own matter
        ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=True).to(words.device, non_blocking=True)
        sums = torch.zeros(len(block_ids), dtype=torch.int64, device=words.device)
        first = 0
        for each in places:
            sum_words(words, ids, first, each.num_bytes, each, sums)
            first += each.num_bytes
        copied = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
        copied.copy_(sums, non_blocking=True)
        ended = torch.Event("cuda")
        ended.record()

    def wait() -> list[int]:
        ended.synchronize()
        return [value & UNSIGNED for value in copied.tolist()]

    return wait
