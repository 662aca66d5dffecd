"""An engine's cache of a few blocks, and its store beside it, on a node of a test cluster."""

import asyncio

from base.block_hash import BlockHash
from base.checksum import checksum
from base.kv_layout import head_layout
from kvstore.block_mover import SegmentMover
from kvstore.engine_store import EngineStore
from tests.kvstore.cluster import BLOCK_BYTES, bytes_of, chain_of

NUM_BLOCKS = 8
ROOT = BlockHash(bytes(16))
LAYOUT = head_layout(num_layers=1, num_heads=1, head_dim=512, block_size=16, dtype="float32")
assert LAYOUT.block_bytes == BLOCK_BYTES


class Engine:
    """An engine's cache of a few blocks, which computes instantly."""

    def __init__(self, segment, memory=None, sum_of=checksum):
        """`memory`: what the segment is of, where it shows none."""
        self.segment = segment
        self.memory = memoryview(segment.memory if memory is None else memory)
        self.sum_of = sum_of
        self.at = {}
        self.num_held = 0

    def compute(self, path):
        for name in chain_of(path):
            if name not in self.at:
                block_id = len(self.at)
                self.at[name] = block_id
                self.view(block_id)[:] = bytes_of(name)

    def forget(self):
        self.at.clear()
        self.memory[:] = bytes(len(self.memory))

    def view(self, block_id):
        return self.memory[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]

    def match(self, chain):
        held = []
        for name in chain:
            if name not in self.at:
                break
            held.append(self.at[name])
        self.num_held += len(held)
        return held

    def release(self, block_ids, evict_first=False):
        self.num_held -= len(block_ids)

    async def checksums(self, block_ids):
        return [self.sum_of(self.view(block_id)) for block_id in block_ids]


class Beside:
    """An `EngineStore` on a node of a cluster, and how long it paused."""

    def __init__(self, node, bytes_per_s, has_quotas=False, engine=None):
        self.node = node
        self.engine = engine or Engine(node.agent.allocate(NUM_BLOCKS * BLOCK_BYTES))
        self.paused_s = []
        self.mover = SegmentMover(node.cache, self.engine.segment, BLOCK_BYTES, self.engine.checksums)
        self.store = EngineStore(
            self.engine, LAYOUT, self.mover, node.store, bytes_per_s, node.clock, self.pause, has_quotas
        )

    async def pause(self, seconds):
        self.paused_s.append(seconds)
        await asyncio.sleep(0)

    async def saved(self, count):
        async with asyncio.timeout(60):
            while self.store.num_saved + self.store.num_dropped < count:
                await asyncio.sleep(0)
        assert self.engine.num_held == 0

    async def load(self, path, first=0):
        """Load what should be; return the bytes of the blocks that came."""
        chain = chain_of(path)
        end = await self.store.reach(chain, first)
        block_ids = list(range(NUM_BLOCKS))[::-1][: end - first]
        count = await self.store.load(chain[:end], block_ids, first) if block_ids else 0
        return [bytes(self.engine.view(block_id)) for block_id in block_ids[:count]]


def contents(path, first=0):
    return [bytes_of(name) for name in chain_of(path)[first:]]
