"""The block cache against a plain list in order of use."""

import random

import pytest

from base.errors import ConfigError
from conductor.replay.block_cache import BlockCache, PolicyCache, make_cache
from kvstore.eviction import BY_NAME


@pytest.mark.parametrize("seed", range(10))
def test_cache_agrees_with_a_list_in_order_of_use(seed: int) -> None:
    rng = random.Random(seed)
    cache, order = BlockCache(12), []
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


def test_cache_of_no_blocks_holds_none() -> None:
    cache = BlockCache(0)
    assert cache.store([1, 2]) == ([], [])
    assert cache.match([1]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_fast_cache_evicts_as_the_live_code_does_under_lru(seed: int) -> None:
    rng = random.Random(seed)
    fast, live = BlockCache(30), PolicyCache("lru", 30)
    for _ in range(300):
        path = [rng.randrange(6), *(rng.randrange(2) for _ in range(rng.randrange(9)))]
        chain = [tuple(path[: depth + 1]) for depth in range(len(path))]
        assert fast.match(chain) == live.match(chain)
        (stored, gone), (live_stored, live_gone) = fast.store(chain), live.store(chain)
        assert list(stored) == list(live_stored)
        assert sorted(gone) == sorted(live_gone)


@pytest.mark.parametrize("policy", BY_NAME)
def test_every_policy_of_the_store_can_be_simulated(policy: str) -> None:
    cache = make_cache(policy, 4)
    assert list(cache.store([1, 2, 3])[0]) == [1, 2, 3]
    cache.store([1, 5, 6])
    assert len(cache) == 4
    assert cache.match([1, 5, 6]) == 3
    cache.clear()
    assert cache.match([1]) == 0


def test_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="admission"):
        make_cache("clock", 4)
