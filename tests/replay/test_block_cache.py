"""The block cache against a plain list in order of use."""

import random

import pytest

from conductor.replay.block_cache import BlockCache


@pytest.mark.parametrize("seed", range(40))
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
