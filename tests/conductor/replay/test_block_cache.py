"""The block cache against a plain list in order of use."""

import dataclasses
import random

import pytest

from base.block_hash import BlockHash
from base.errors import ConfigError
from conductor.placing.profile import Profile
from conductor.profiles.reader import load_profile
from conductor.replay.block_cache import LruCache, PolicyCache, make_cache
from engine.block_pool import BlockPool
from kvstore.eviction import BY_NAME


def sized(in_memory: int, on_disk: int = 0) -> Profile:
    profile = load_profile("a800-llama70b")
    return dataclasses.replace(profile, host_kv_tokens=in_memory, disk_kv_tokens=on_disk)


@pytest.mark.parametrize("seed", range(10))
def test_cache_agrees_with_a_list_in_order_of_use(seed: int) -> None:
    rng = random.Random(seed)
    cache, order = LruCache(12), []
    for _ in range(200):
        # chains form a tree: a block names all before it
        path = [rng.randrange(4), *(rng.randrange(2) for _ in range(rng.randrange(7)))]
        chain = [tuple(path[: depth + 1]) for depth in range(len(path))]
        held = cache.match(chain)
        assert held == next((depth for depth, key in enumerate(chain) if key not in order), len(chain))
        stored, evicted = cache.store(chain)
        assert list(stored) == chain[held:]
        for key in reversed(chain):
            if key in order:
                order.remove(key)
            order.append(key)
        expected = order[: max(0, len(order) - 12)]
        del order[: len(expected)]
        assert evicted == expected
        assert len(cache) == len(order)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_another_node_keeps_goes_as_it_does_in_an_engine(seed: int, share: float) -> None:
    rng = random.Random(seed)
    cache, pool = LruCache(12), BlockPool(12)
    for _ in range(200):
        path = [rng.randrange(4), *(rng.randrange(2) for _ in range(rng.randrange(7)))]
        chain = [BlockHash(bytes(path[: depth + 1])) for depth in range(len(path))]
        block_ids = pool.match(chain)
        assert cache.match(chain) == len(block_ids)
        block_ids += pool.allocate(len(chain) - len(block_ids))
        for block_id, name, parent in zip(block_ids, chain, [None, *chain], strict=False):
            pool.publish(block_id, name, parent)
        evict_first = rng.random() < share
        pool.release(block_ids, evict_first)
        stored, evicted = cache.store(chain, evict_first)
        assert (list(stored), evicted) == pool.take_events()


def test_cache_of_no_blocks_holds_none() -> None:
    cache = LruCache(0)
    assert cache.store([1, 2]) == ([], [])
    assert cache.match([1]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_fast_cache_evicts_as_the_live_code_does_under_lru(seed: int) -> None:
    rng = random.Random(seed)
    fast, live = LruCache(30), PolicyCache("lru", 30)
    for _ in range(300):
        path = [rng.randrange(6), *(rng.randrange(2) for _ in range(rng.randrange(9)))]
        chain = [tuple(path[: depth + 1]) for depth in range(len(path))]
        assert fast.match(chain) == live.match(chain)
        (stored, gone), (live_stored, live_gone) = fast.store(chain), live.store(chain)
        assert list(stored) == list(live_stored)
        assert sorted(gone) == sorted(live_gone)


@pytest.mark.parametrize("policy", BY_NAME)
def test_every_policy_of_the_store_can_be_simulated(policy: str) -> None:
    cache = make_cache(policy, sized(4), 1)
    assert list(cache.store([1, 2, 3])[0]) == [1, 2, 3]
    cache.store([1, 5, 6])
    assert len(cache) == 4
    assert cache.match([1, 5, 6]) == 3
    cache.clear()
    assert cache.match([1]) == 0


def test_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="admission"):
        make_cache("clock", sized(4), 1)


@pytest.mark.parametrize("seed", range(6))
def test_memory_and_disk_hold_what_one_larger_cache_would_and_memory_the_latest_of_it(seed: int) -> None:
    rng = random.Random(seed)
    tiers, whole, memory = make_cache("lru", sized(10, 15), 1), LruCache(25), LruCache(10)
    for _ in range(200):
        path = [rng.randrange(5), *(rng.randrange(2) for _ in range(rng.randrange(7)))]
        chain = [tuple(path[: depth + 1]) for depth in range(len(path))]
        matched = tiers.match(chain)
        assert matched == whole.match(chain)
        assert tiers.num_on_disk(chain, matched) == matched - memory.match(chain)
        assert tiers.store(chain) == whole.store(chain)
        memory.store(chain)
        assert tiers.num_on_disk(chain, tiers.match(chain)) == 0
