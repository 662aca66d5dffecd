"""Blocks on their way up from a disk, in virtual time."""

import random

from base.block_hash import BlockHash
from base.checksum import checksum
from base.config import TransferConfig
from kvstore.disk import DiskTier
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool
from kvstore.store import PUT_S, Store
from tests.simulation.disk import DiskFaults, SimDisk
from tests.simulation.loop import SimLoop
from transfer.agent import TransferAgent

BLOCK_BYTES = 64
NAME = BlockHash(bytes(16))


def test_a_disk_that_takes_longer_than_a_put_may_costs_time_and_no_memory(monkeypatch):
    monkeypatch.setattr("kvstore.store.LIFT_S", None)

    async def scenario(clock):
        agent = TransferAgent("n", 1, TransferConfig(transports=("tcp",)), clock)
        disk = DiskTier(SimDisk(random.Random(0), DiskFaults()), BLOCK_BYTES, 4, clock)
        store = Store(agent, HostPool(4, BY_NAME["lru"], clock), BLOCK_BYTES, disk)
        payload = memoryview(bytes(range(BLOCK_BYTES)))
        await disk.write(NAME, payload, checksum(payload))
        leased = await store.lease([NAME], 0)
        await store.release(leased.ticket)
        await store.tick()
        await agent.close()
        return leased.num_blocks, store.pool.accounts().in_transfer

    loop = SimLoop(lambda: (PUT_S + 1, False))
    try:
        assert loop.run_until_complete(scenario(loop)) == (1, 0)
    finally:
        loop.close()
