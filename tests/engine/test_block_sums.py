"""Checksums of a paged cache's blocks, on the device where the cache is."""

import pytest
import torch

from base.checksum import checksum, is_checksum_of, sum_of_words
from base.kv_layout import head_layout
from engine.block_sums import UNSIGNED, block_sums, sum_kind
from engine.paged_cache import PagedCache
from tests.engine.definitions import sum_words_definition

LAYOUT = head_layout(num_layers=3, num_heads=2, head_dim=8, block_size=16, dtype="bfloat16")


def random_cache(device: str) -> PagedCache:
    cache = PagedCache(LAYOUT, 8, torch.device(device))
    cache.heads().copy_(torch.randn(cache.heads().shape, generator=torch.Generator().manual_seed(0)))
    return cache


async def test_on_a_cpu_a_sum_is_of_a_blocks_bytes() -> None:
    cache = random_cache("cpu")
    assert await block_sums(cache, [5, 0]) == [checksum(cache.block_bytes_view(block)) for block in (5, 0)]
    assert sum_kind(cache) == "xxh3"


def test_a_host_takes_the_sum_that_a_gpu_takes() -> None:
    cache = random_cache("cpu")
    words = cache.heads().view(8, -1).view(torch.int64)
    defined = sum_words_definition(words, torch.arange(8), 0, words.shape[1]).tolist()
    for block, value in enumerate(defined):
        data = cache.block_bytes_view(block)
        assert sum_of_words(data) == value & UNSIGNED
        assert is_checksum_of(value & UNSIGNED, data)
        assert is_checksum_of(checksum(data), data)
        assert not is_checksum_of(value + 1 & UNSIGNED, data)


@pytest.mark.gpu
async def test_on_a_gpu_a_sum_is_the_kernels_and_sees_one_bit() -> None:
    cache = random_cache("cuda")
    words = cache.heads().view(8, -1).view(torch.int64)
    ids = torch.tensor([5, 0], dtype=torch.int32, device="cuda")
    expected = [value & UNSIGNED for value in sum_words_definition(words, ids, 0, words.shape[1]).tolist()]
    assert await block_sums(cache, [5, 0]) == expected
    words[0, 17] ^= 1 << 40
    torch.cuda.synchronize()  # block_sums trusts that what was written is there
    changed = await block_sums(cache, [5, 0])
    assert changed[0] == expected[0]
    assert changed[1] != expected[1]
    assert sum_kind(cache) != "xxh3"
