"""The upkeep of a store whose peer, or whose disk, takes for ever."""

import asyncio
import os
import threading
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile
from unittest.mock import patch

import pytest

from kvstore.disk import DirectFile, DiskTier
from kvstore.hosting import keep_up
from kvstore.store import LEASE_S, UPKEEP_S
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, running_cluster, save
from transfer.owned.board import PeerBoard

GIVEN_S = LEASE_S + 1.0


@pytest.fixture
async def cluster():
    async with running_cluster() as cluster:
        yield cluster


@asynccontextmanager
async def kept_up(store):
    """The store is kept up during the body, which waits for what hangs as long as any store does."""
    keeping = asyncio.create_task(keep_up(store))
    try:
        with patch("kvstore.store.UPKEEP_S", UPKEEP_S):
            yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def some_turns():
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def frozen_in_a_copy(node, grant):
    """A process of this host stands still while it copies under the grant, for the length of the body."""
    frozen = PeerBoard(node.member.peer.address_or_none("shm"), node.member.epoch)
    frozen.hold(grant)
    try:
        yield
    finally:
        frozen.close()


class HangingFile(DirectFile):
    """Answers no write, or no read, before it may."""

    def __init__(self):
        with TemporaryFile() as file:
            fd = os.dup(file.fileno())
        super().__init__(fd, fd)
        self.may_write, self.may_read = threading.Event(), threading.Event()

    def read(self, offset, parts):
        self.may_read.wait()
        return super().read(offset, parts)

    def write(self, offset, parts):
        self.may_write.wait()
        return super().write(offset, parts)

    def answer(self):
        """Let it answer all that it is asked, now and later."""
        self.may_write.set()
        self.may_read.set()


@asynccontextmanager
async def a_node_with(disk, cluster):
    """A node of ten blocks, which takes to this disk what is above two once there are more than five."""
    one = await cluster.node("one", num_blocks=10, high_watermark=0.5, low_watermark=0.2)
    one.store.disk = DiskTier(disk, BLOCK_BYTES, 16, one.clock)
    try:
        yield one
    finally:
        disk.answer()
        await one.store.close()
        await one.store.disk.close()


async def test_a_reader_that_is_frozen_keeps_its_own_blocks_alone(cluster):
    one = await cluster.node("one", transports=("shm",))
    for path in "abc", "xyz":
        await save(one.cache, path)
    leased = await one.store.lease(chain_of("abc"), 0)
    await one.store.lease(chain_of("xyz"), 0)
    one.clock.advance(GIVEN_S)
    async with frozen_in_a_copy(one, leased.grant), kept_up(one.store):
        await until(lambda: one.store.pool.accounts().held == 3)
        assert one.store.pool.match(chain_of("abc")) == 3
    await one.store.tick()
    await until(lambda: one.store.pool.accounts().held == 0)
    one.store.check()


async def test_a_lease_that_is_ended_twice_holds_until_the_copy_under_it_is_over(cluster):
    one = await cluster.node("one", transports=("shm",))
    await save(one.cache, "abc")
    leased = await one.store.lease(chain_of("abc"), 0)
    async with frozen_in_a_copy(one, leased.grant):
        ending = [asyncio.create_task(one.store.release(leased.ticket)) for _ in range(2)]
        await some_turns()
        assert one.store.pool.accounts().held == 3
    await asyncio.gather(*ending)
    assert one.store.pool.accounts().held == 0


async def test_a_disk_that_hangs_keeps_no_put_and_no_lease_that_ran_out(cluster):
    disk = HangingFile()
    async with a_node_with(disk, cluster) as one:
        await save(one.cache, "abcdef")
        async with kept_up(one.store):
            await until(lambda: one.store.pool.accounts().in_transfer == 4)
            one.store.reserve(chain_of("xy"), "")
            await one.store.lease(chain_of("ab"), 0)
            one.clock.advance(GIVEN_S)
            await until(lambda: one.store.pool.accounts().in_transfer == 4)
            await until(lambda: one.store.pool.accounts().held == 0)
            disk.may_write.set()
            await until(lambda: len(one.store.disk.hashes) == 4)
        one.store.check()


async def test_what_is_deleted_on_its_way_to_disk_is_gone(cluster):
    disk = HangingFile()
    async with a_node_with(disk, cluster) as one:
        await save(one.cache, "abcdef")
        lowering = asyncio.create_task(one.store.tick())
        await until(lambda: one.store.pool.accounts().in_transfer == 4)
        deleting = asyncio.create_task(one.store.delete(chain_of("abcdef")))
        await some_turns()
        disk.may_write.set()
        await lowering
        assert await deleting == 6
        assert one.store.match(chain_of("abcdef")).num_blocks == 0
        one.store.check()


class HangsInItsSecondGroup(HangingFile):
    """Answers writes of blocks beyond the first two slots later than the others."""

    def __init__(self):
        super().__init__()
        self.may_write_more = threading.Event()

    def answer(self):
        self.may_write_more.set()
        super().answer()

    def write(self, offset, parts):
        if len(parts) > 1 and offset >= 2 * BLOCK_BYTES:
            self.may_write_more.wait()
        return super().write(offset, parts)


async def test_what_is_deleted_on_its_way_to_disk_group_by_group_is_gone(cluster, monkeypatch):
    monkeypatch.setattr("kvstore.store.LEAVE_BLOCKS", 2)
    disk = HangsInItsSecondGroup()
    async with a_node_with(disk, cluster) as one:
        await save(one.cache, "abcdefgh")
        lowering = asyncio.create_task(one.store.tick())
        await until(lambda: one.store.pool.accounts().in_transfer == 2)
        deleting = asyncio.create_task(one.store.delete(chain_of("abcdefgh")))
        await some_turns()
        disk.may_write.set()
        await until(lambda: len(one.store.disk.hashes) == 2)
        for _ in range(50):  # it takes some to pass over a group that it does not wait for
            await some_turns()
        disk.may_write_more.set()
        await lowering
        assert await deleting == 8
        assert not any(name in one.store for name in chain_of("abcdefgh"))
        one.store.check()


async def test_a_reader_gives_a_disk_that_hangs_so_long_and_then_has_what_is_in_memory(cluster, monkeypatch):
    monkeypatch.setattr("kvstore.store.LIFT_S", 0.01)
    two = await cluster.node("two")
    disk = HangingFile()
    disk.may_write.set()
    async with a_node_with(disk, cluster) as one:
        await save(one.cache, "abcdef")
        await one.store.tick()
        assert one.store.match(chain_of("abcdef")).num_in_memory == 2
        assert await load(one.cache, "abcdef") == 2
        assert await load(two.cache, "abcdef") == 2
        monkeypatch.setattr("kvstore.store.LIFT_S", 60.0)
        waiting = asyncio.create_task(one.store.lease(chain_of("abcdef"), 0))
        await some_turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        one.store.check()
        disk.may_read.set()
        await until(lambda: one.store.pool.accounts().in_transfer == 0)
        assert one.store.pool.accounts().held == 0
        one.store.check()
        assert (await one.store.lease(chain_of("abcdef"), 0)).num_blocks == 6
