"""Replicas by heat: who gets one, from whom, and again when a node goes."""

import random

import pytest

from base.errors import CapacityError
from base.grants import PeerDescriptor
from base.request import NodeId
from kvstore.heat import Heat
from kvstore.member import Member
from kvstore.replication import HOT, MAX_REPLICAS, Replicator, num_replicas, target_or_none
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, running_cluster, save


def member_of(name, epoch, host=None):
    return Member(NodeId(name), epoch, "", host or name, PeerDescriptor(name, epoch, ()), 1)


ONE, TWO, THREE = member_of("one", 1), member_of("two", 2), member_of("three", 3)
BLOCK = chain_of("a")[0]


def test_each_doubling_of_heat_asks_for_one_replica_more():
    assert [num_replicas(score) for score in (0, HOT - 1, HOT, 2 * HOT, 4 * HOT, 1e9)] == [
        *(1, 1, 2, 3, 4),
        MAX_REPLICAS,
    ]


def test_the_holder_of_the_lowest_epoch_copies_and_no_other():
    everybody = [ONE, TWO, THREE]
    assert target_or_none(BLOCK, 2 * HOT, ONE, (ONE, TWO), everybody) == THREE
    assert target_or_none(BLOCK, 2 * HOT, TWO, (ONE, TWO), everybody) is None


def test_a_replica_goes_to_another_host_where_there_is_one():
    neighbours = [member_of(f"n{epoch}", epoch, host="one") for epoch in range(10, 20)]
    assert target_or_none(BLOCK, HOT, ONE, (ONE,), [ONE, *neighbours, TWO]) == TWO
    assert target_or_none(BLOCK, HOT, ONE, (ONE,), [ONE, *neighbours]) in neighbours


def test_enough_replicas_or_nobody_else_means_no_copy():
    assert target_or_none(BLOCK, HOT, ONE, (ONE, TWO), [ONE, TWO, THREE]) is None
    assert target_or_none(BLOCK, HOT, ONE, (ONE,), [ONE]) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_never_hotter_than_the_one_before_it(seed):
    rng, heat = random.Random(seed), Heat()
    for _ in range(200):
        path = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6)))
        heat.note(chain_of(path))
        if rng.random() < 0.1:
            heat.fade()
        for parent, child in zip(chain_of(path), chain_of(path)[1:], strict=False):
            assert heat.of(parent) >= heat.of(child)


def test_what_is_not_read_cools_until_it_is_forgotten():
    heat = Heat()
    heat.note(chain_of("ab"))
    for _ in range(3):
        heat.fade()
    assert heat.above(0.0) == []


@pytest.fixture
async def nodes():
    async with running_cluster() as cluster:
        made = [await cluster.node(name, num_blocks=32) for name in ("one", "two", "three")]
        yield made


def replicator_of(node):
    return Replicator(node.store, node.cache, node.member)


async def names(node, path):
    replicas = await node.cache.directory.lookup(chain_of(path))
    return [sorted(member.node_id for member in members) for members in replicas]


async def test_a_hot_chain_is_copied_and_a_cold_one_is_not(nodes):
    one, two, _ = nodes
    await save(one.cache, "abc")
    await save(one.cache, "xyz")
    for _ in range(4):
        await load(two.cache, "abc")
    copied = await replicator_of(one).round(1 << 30)
    assert copied == 3 * BLOCK_BYTES
    assert [len(holders) for holders in await names(one, "abc")] == [2, 2, 2]
    assert await names(one, "xyz") == [["one"]] * 3


async def test_a_round_copies_no_more_than_its_bytes_and_the_next_goes_on(nodes):
    one, _, _ = nodes
    await save(one.cache, "abcde")
    replicator = replicator_of(one)
    copied = []
    for _ in range(4):
        for _ in range(4):
            one.store.heat.note(chain_of("abcde"))
        copied.append(await replicator.round(2 * BLOCK_BYTES + 5))
        one.store.heat.fade()
    assert copied == [2 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES, 0]


class Refusing:
    """A store that cannot lend the chains with some block in them."""

    def __init__(self, store, refused):
        self.__dict__.update(inner=store, refused=refused)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def lease(self, chain, first):
        if self.refused in chain:
            raise CapacityError("too many grants are live")
        return await self.inner.lease(chain, first)


async def test_a_chain_that_cannot_be_copied_does_not_end_the_round(nodes):
    one, two, _ = nodes
    await save(one.cache, "abc")
    await save(one.cache, "xyz")
    for _ in range(4):
        await load(two.cache, "abc")
        await load(two.cache, "xyz")
    store = Refusing(one.store, chain_of("abc")[2])
    assert await Replicator(store, one.cache, one.member).round(1 << 30) == 3 * BLOCK_BYTES
    assert [len(holders) for holders in await names(one, "xyz")] == [2, 2, 2]
    assert await names(one, "abc") == [["one"]] * 3


async def test_when_a_replicas_node_goes_the_block_is_copied_again(nodes):
    one, two, three = nodes
    await save(one.cache, "abc")
    for _ in range(5):
        await load(two.cache, "abc")
    await replicator_of(one).round(1 << 30)
    second = next(name for name in (await names(one, "abc"))[0] if name != "one")
    gone = next(node for node in nodes if node.member.node_id == second)
    left = next(node for node in (two, three) if node is not gone)
    await gone.die()
    await gone.cache.directory.leave()
    for _ in range(8):
        await load(left.cache, "abc")
    await replicator_of(one).round(1 << 30)
    assert await names(one, "abc") == [sorted(["one", left.member.node_id])] * 3
    await one.die()
    await one.cache.directory.leave()
    assert await load(left.cache, "abc") == 3
