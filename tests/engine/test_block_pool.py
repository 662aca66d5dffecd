"""The block pool against a naive model of it, and the promises of its docstrings."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from base.block_hash import BlockHash, chain_root, hash_chain
from base.errors import CapacityError
from engine.block_pool import BlockPool

ROOT = chain_root("model", "layout")
NUM_BLOCKS = 8


def chain(*token_ids: int) -> list[BlockHash]:
    return hash_chain(token_ids, 1, ROOT)


def fill(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Compute what is not matched, publish all: what a sequence does."""
    table = pool.match(hashes)
    table += pool.allocate(len(hashes) - len(table))
    for index, block_id in enumerate(table):
        pool.publish(block_id, hashes[index], hashes[index - 1] if index else None)
    return table


def test_released_blocks_are_matched_again() -> None:
    pool = BlockPool(4)
    table = fill(pool, chain(1, 2, 3))
    pool.release(table)
    assert pool.match(chain(1, 2, 9)) == table[:2]


def test_blocks_that_several_hold_are_counted_once_for_each_but_the_first() -> None:
    pool = BlockPool(8)
    tables = [fill(pool, chain(1, 2, 3)), fill(pool, chain(1, 2, 4)), fill(pool, chain(1, 5))]
    assert (pool.num_held, pool.num_shared) == (5, 3)
    for table, left in zip(tables, [1, 0, 0], strict=True):
        pool.release(table)
        assert pool.num_shared == left
        pool.check()


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    table = fill(pool, chain(1, 2, 3))
    pool.release(table)
    assert pool.allocate(2) == [table[2], table[1]]
    assert pool.match(chain(1, 2, 3)) == [table[0]]


def test_the_chain_released_first_is_evicted_first() -> None:
    pool = BlockPool(4)
    older, newer = fill(pool, chain(1, 2)), fill(pool, chain(3, 4))
    pool.release(newer)
    pool.release(older)
    pool.allocate(2)
    assert pool.match(chain(3, 4)) == []
    assert pool.match(chain(1, 2)) == older


def test_a_chain_that_another_node_keeps_is_evicted_before_older_ones() -> None:
    pool = BlockPool(4)
    older, newer = fill(pool, chain(1, 2)), fill(pool, chain(3, 4))
    pool.release(older)
    pool.release(newer, evict_first=True)
    assert pool.allocate(2) == [newer[1], newer[0]]
    assert pool.match(chain(1, 2)) == older


def test_what_another_chain_shares_is_not_evicted_first() -> None:
    pool = BlockPool(5)
    pool.release(fill(pool, chain(1, 2, 3)))
    other = fill(pool, chain(1, 2, 4))
    pool.release(fill(pool, chain(5)))
    pool.release(other, evict_first=True)
    assert pool.allocate(2) == [other[2], 2], "the tail, and then the oldest: not what both share"
    assert pool.match(chain(1, 2, 9)) == other[:2]


def test_the_beginning_of_a_longer_chain_is_not_evicted_first() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, chain(1, 2, 3)))
    pool.release(fill(pool, chain(4)))
    pool.release(pool.match(chain(1, 2)), evict_first=True)
    pool.allocate(1)
    assert len(pool.match(chain(1, 2))) == 2


def test_a_chain_that_is_used_again_is_not_evicted_first_any_more() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, chain(1, 2)), evict_first=True)
    pool.release(fill(pool, chain(3, 4)), evict_first=True)
    pool.release(pool.match(chain(1, 2)))
    pool.allocate(2)
    assert len(pool.match(chain(1, 2))) == 2
    assert pool.match(chain(3, 4)) == []


@pytest.mark.parametrize("is_early", [False, True])
def test_a_chain_that_is_only_read_is_evicted_first_as_before(is_early: bool) -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, chain(1, 2)))
    table = fill(pool, chain(3, 4))
    if is_early:
        pool.hold(table)
    pool.release(table, evict_first=True)
    if not is_early:
        pool.hold(table)
    pool.release(table, None)
    assert pool.allocate(2) == table[::-1]


def test_a_chain_that_is_read_while_another_comes_to_keep_it_is_kept() -> None:
    pool = BlockPool(4)
    kept = fill(pool, chain(1, 2))
    pool.release(kept, evict_first=True)
    pool.release(fill(pool, chain(3, 4)))
    read, used = pool.match(chain(1, 2)), pool.match(chain(1, 2))
    pool.release(used)
    pool.release(read, None)
    pool.allocate(2)
    assert pool.match(chain(1, 2)) == kept


@pytest.mark.timeout(60)  # it takes a second, and minutes where each looks past all that are gone
def test_evicting_one_of_many_takes_as_long_as_evicting_one_of_few() -> None:
    pool = BlockPool(400_000)
    block_ids = pool.allocate(400_000)
    for block_id in block_ids:
        pool.publish(block_id, BlockHash(block_id.to_bytes(16)))
    pool.release(block_ids)
    assert pool.allocate(400_000) == block_ids[::-1]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    pool.release(fill(pool, chain(1)))
    pool.allocate(2)
    assert pool.snapshot() == chain(1)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.release(fill(pool, chain(1, 2)))
    pool.allocate(1)
    with pytest.raises(CapacityError):
        pool.allocate(3)
    assert pool.num_available == 2
    assert pool.snapshot() == chain(1, 2)


def test_a_second_copy_takes_over_the_name_of_the_evicted_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    (name,) = chain(1)
    pool.publish(first, name)
    pool.publish(second, name)
    pool.release([first])
    pool.release(pool.allocate(1))
    assert pool.allocate(2)[1] == first
    assert pool.match([name]) == [second]


def test_events_are_the_net_change() -> None:
    pool = BlockPool(1)
    pool.release(fill(pool, chain(1)))
    assert pool.take_events() == (chain(1), [])
    pool.release(fill(pool, chain(2)))
    pool.release(fill(pool, chain(3)))
    assert pool.take_events() == (chain(3), chain(1))
    assert pool.take_events() == ([], [])


def test_release_tells_who_waits_for_blocks() -> None:
    pool = BlockPool(1)
    seen = []
    pool.on_release(lambda: seen.append(pool.num_available))
    pool.release(pool.allocate(1))
    assert seen == [1]


class PoolMachine(RuleBasedStateMachine):
    """Random histories. The model: holds per block, and names in the order of release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[tuple[list[int], list[BlockHash]]] = []
        self.known: set[BlockHash] = set()
        self.read: list[list[int]] = []
        self.parents: dict[BlockHash, BlockHash] = {}

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=6), published=st.integers(0, 6))
    def start(self, token_ids: list[int], published: int) -> None:
        hashes = chain(*token_ids)
        cached = set(self.pool.snapshot())
        table = self.pool.match(hashes)
        longest = next((i for i, name in enumerate(hashes) if name not in cached), len(hashes))
        assert len(table) == longest
        missing, room = len(hashes) - longest, self.pool.num_available
        try:
            table += self.pool.allocate(missing)
        except CapacityError:
            assert missing > room
            self.pool.release(table)
            return
        assert missing <= room
        # Published in order, perhaps not all: the end of the chain is still being computed.
        count = max(longest, min(published, len(hashes)))
        for index in range(count):
            self.pool.publish(table[index], hashes[index], hashes[index - 1] if index else None)
        self.tables.append((table, hashes))
        self.parents |= dict(pairwise(reversed(hashes)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        table, hashes = data.draw(st.sampled_from(self.tables))
        for index, block_id in enumerate(table):
            self.pool.publish(block_id, hashes[index], hashes[index - 1] if index else None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), evict_first=st.booleans())
    def end(self, data: st.DataObject, evict_first: bool) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        cached = set(self.pool.snapshot())
        self.pool.release(table, evict_first)
        assert set(self.pool.snapshot()) == cached, "release evicts nothing"

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def hold_and_release(self, data: st.DataObject) -> None:
        table, _ = data.draw(st.sampled_from(self.tables))
        self.pool.hold(table)
        self.pool.release(table)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def begin_to_read(self, token_ids: list[int]) -> None:
        self.read.append(self.pool.match(chain(*token_ids)))

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        self.pool.release(self.read.pop(data.draw(st.integers(0, len(self.read) - 1))), None)

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.take_events()
        assert not set(stored) & self.known
        assert set(removed) <= self.known
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.pool.snapshot())

    @invariant()
    def accounted_for(self) -> None:
        self.pool.check()
        tables = *self.read, *(table for table, _ in self.tables)
        held = {block_id for table in tables for block_id in table}
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == NUM_BLOCKS - len(held)

    @invariant()
    def parents_come_before_children(self) -> None:
        order = {name: index for index, name in enumerate(self.pool.snapshot())}
        for _, hashes in self.tables:
            places = [order[name] for name in hashes if name in order]
            assert places == sorted(places)
        for name in order:
            assert name not in self.parents or self.parents[name] in order, "a child that nobody can match"


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
