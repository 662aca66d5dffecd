"""Chains of many thousand blocks: what is done with one leaves the event loop to others in between."""

import asyncio

import pytest

from base.block_hash import BlockHash
from base.config import TransferConfig
from base.errors import LeaseExpiredError
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool
from kvstore.service import StoreService
from kvstore.store import LEASE_S, MAX_PUT_BLOCKS, Store
from protos import kvstore_pb2 as pb
from tests.effort import counting
from tests.kvstore.cluster import chain_of, running_cluster, save
from tests.manual_clock import ManualClock
from transfer.agent import TransferAgent

NUM_BLOCKS = 3 * MAX_PUT_BLOCKS
CHAIN = [BlockHash(number.to_bytes(16, "little")) for number in range(NUM_BLOCKS)]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def store(clock):
    """A store that has all of the chain."""
    async with TransferAgent("s", 1, TransferConfig(transports=("tcp",)), clock) as agent:
        store = Store(agent, HostPool(NUM_BLOCKS, BY_NAME["admission"], clock), 4096)
        for end in range(MAX_PUT_BLOCKS, NUM_BLOCKS + 1, MAX_PUT_BLOCKS):
            put = store.reserve(CHAIN[:end], "")
            await store.commit(put.ticket, [1] * len(put.missing))
        yield store
        await store.close()


def turns_of(work):
    """Return the lines that ran in each turn of the event loop, and what `work` returned."""
    lines, returned = [], []
    while not returned:
        with counting() as effort:
            try:
                work.send(None)
            except StopIteration as end:
                returned.append(end.value)
        lines.append(effort.lines)
    return lines, returned[0]


async def test_a_long_chain_is_deleted_so_many_blocks_a_turn(store):
    lines, num_gone = turns_of(store.delete(CHAIN))
    assert num_gone == NUM_BLOCKS
    assert max(lines) < 40 * MAX_PUT_BLOCKS
    store.check()


async def test_what_is_left_between_two_turns_of_a_delete_is_a_whole_chain(store):
    noticed = []
    store.on_change(noticed.extend)
    deleting = store.delete(CHAIN)
    deleting.send(None)
    left = store.match(CHAIN).num_blocks
    assert left == store.pool.accounts().cached == 2 * MAX_PUT_BLOCKS
    assert set(noticed) == set(CHAIN[left:])
    store.check()
    held = store.pool.lease(CHAIN[:left], 30.0)
    _, num_gone = turns_of(deleting)
    assert num_gone == MAX_PUT_BLOCKS
    assert store.match(CHAIN).num_blocks == left
    store.pool.end(held.lease_id)
    store.check()


async def test_a_delete_goes_on_where_others_have_taken_the_end_of_what_is_left(store):
    deleting = store.delete(CHAIN)
    deleting.send(None)
    others = [BlockHash((NUM_BLOCKS + number).to_bytes(16, "little")) for number in range(MAX_PUT_BLOCKS + 1)]
    assert len(store.reserve(others, "").missing) == len(others)
    assert store.match(CHAIN).num_blocks == 2 * MAX_PUT_BLOCKS - 1
    turns_of(deleting)
    assert store.match(CHAIN).num_blocks == 0
    store.check()


async def test_a_delete_takes_what_goes_to_disk_between_two_turns(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.store.MAX_PUT_BLOCKS", 1)
    async with running_cluster() as cluster:
        one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.3, low_watermark=0.1)
        cache, _ = await cluster.client()
        assert await save(cache, "abcdef") == 6
        going_to_disk = asyncio.create_task(one.store.tick())
        assert await one.store.delete(chain_of("abcdef")) == 6
        await going_to_disk
        assert one.store.match(chain_of("abcdef")).num_blocks == 0
        one.store.check()


class Caller:
    """The context of a call."""

    def peer(self):
        return "ipv4:10.0.0.1:1"


async def test_a_long_chain_is_read_then_held_and_then_granted_each_in_a_turn_of_its_own(store):
    service = StoreService(store, ManualClock(), lambda: None)
    lines, leased = turns_of(service.Lease(pb.LeaseRequest(hashes=b"".join(CHAIN)), Caller()))
    assert leased.num_blocks == len(leased.grant.offsets) == NUM_BLOCKS
    assert len(lines) == 3
    assert max(lines) < 13 * NUM_BLOCKS
    await store.release(leased.ticket)
    store.check()


async def test_a_lease_that_runs_out_or_is_cancelled_before_its_grant_holds_and_grants_nothing(store, clock):
    late, cancelled = store.lease(CHAIN, 0), store.lease(CHAIN, 0)
    for _ in range(2):
        late.send(None)
        cancelled.send(None)
    assert store.pool.accounts().held == NUM_BLOCKS
    with pytest.raises(asyncio.CancelledError):
        cancelled.throw(asyncio.CancelledError())
    assert store.pool.accounts().held == NUM_BLOCKS
    clock.advance(LEASE_S)
    await store.tick()
    with pytest.raises(LeaseExpiredError):
        late.send(None)
    assert store.pool.accounts().held == 0
    store.check()
