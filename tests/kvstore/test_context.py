"""The context-caching API: KV by token ids, one tenant apart from another."""

import random

import pytest

from base.checksum import CHECKSUM_KIND, DEVICE_CHECKSUM_KIND
from base.kv_layout import head_layout
from kvstore.context import ContextCache
from tests.kvstore.cluster import BLOCK_BYTES, running_cluster

LAYOUT = head_layout(num_layers=4, num_heads=2, head_dim=128, block_size=16, dtype="bfloat16")


@pytest.fixture(params=[CHECKSUM_KIND, DEVICE_CHECKSUM_KIND])
async def caches(request):
    assert LAYOUT.block_bytes == BLOCK_BYTES
    async with running_cluster() as cluster:
        await cluster.node("one")
        cache, _ = await cluster.client()
        yield [
            ContextCache(cache, "model", LAYOUT, name, f"secret of {name}", request.param) for name in "ab"
        ]


def filled(cache, token_ids):
    segment = cache.segment(len(token_ids))
    segment.memory[:] = random.Random(1).randbytes(segment.num_bytes)
    return segment


async def test_a_prompt_that_was_put_is_got_by_its_token_ids(caches):
    cache, prompt = caches[0], list(range(100))
    source = filled(cache, prompt)
    assert await cache.put(prompt, source) == 96
    assert await cache.match([*prompt[:80], 7, 8]) == 80
    into = cache.segment(100)
    assert await cache.get(prompt, into) == 96
    assert into.memory == source.memory
    assert await cache.put(prompt, source) == 0


async def test_another_tenant_finds_nothing(caches):
    one, other = caches
    prompt = list(range(64))
    await one.put(prompt, filled(one, prompt))
    assert await other.match(prompt) == 0
    assert await other.delete(prompt) == 0
    assert await one.match(prompt) == 64


async def test_a_deleted_prompt_is_gone(caches):
    cache, prompt = caches[0], list(range(64))
    await cache.put(prompt, filled(cache, prompt))
    assert await cache.delete(prompt) == 4
    assert await cache.match(prompt) == 0
