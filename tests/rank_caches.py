"""The caches of a node of several ranks, in one process: a shard, an agent and a pool of block ids."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch

from base.clock import SystemClock
from base.config import TransferConfig
from base.kv_layout import KvField, KvLayout, KvPart, part_columns
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from transfer.agent import TransferAgent
from transfer.shard import LocalShard, NodeKv

LAYOUT = KvLayout(
    num_layers=4,
    num_heads=4,
    block_size=16,
    fields=(
        KvField("key", 4, "float32"),
        KvField("value", 8, "bfloat16"),
        KvField("latent", 12, "bfloat16", has_heads=False),
        KvField("scale", 4, "float32", is_per_token=False),
    ),
)
"""All kinds of fields that there are."""
NUM_BLOCKS = 6
GROUPS = {"1": (1, 1), "2 stages": (1, 2), "2 heads": (2, 1), "2 x 2": (2, 2), "4 heads": (4, 1)}


class RankedNode:
    """The ranks of a node, each with an agent and a cache of its own."""

    def __init__(self, tensor, stages):
        layers, heads = 4 // stages, 4 // tensor
        self.parts = [
            KvPart(stage * layers, layers, place * heads, heads)
            for stage in range(stages)
            for place in range(tensor)
        ]
        self.pool = BlockPool(NUM_BLOCKS)
        self.agents, self.caches, self.segments = [], [], []

    @asynccontextmanager
    async def running(self, name):
        shards = []
        async with AsyncExitStack() as agents:
            for rank, part in enumerate(self.parts):
                agent = TransferAgent(
                    f"{name}/{rank}", rank + 1, TransferConfig(transports=("tcp",)), SystemClock()
                )
                await agents.enter_async_context(agent)
                layout = part.of(LAYOUT)
                segment = agent.allocate(NUM_BLOCKS * layout.block_bytes)
                cache = PagedCache(layout, NUM_BLOCKS, torch.device("cpu"), segment.memory)
                sums, layer_parts = partial(block_sums, cache), (1,) * part.num_layers
                shards.append(LocalShard(part, layout, segment, agent, sums, layer_parts=layer_parts))
                self.agents.append(agent)
                self.caches.append(cache)
                self.segments.append(segment)
            self.kv = NodeKv(LAYOUT, tuple(shards))
            yield self

    def of(self, whole, part):
        """Return what a rank has of blocks [num_blocks, block_bytes]."""
        return torch.cat(part_columns(whole, LAYOUT, part), dim=1)


def random_blocks():
    """Return bytes for all blocks, as a node of one rank has them."""
    return torch.randint(256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=torch.uint8)
