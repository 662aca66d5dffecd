"""KV that several ranks have goes to several others, each to each, and is verified part by part."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import torch

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import ChecksumError
from base.kv_layout import KvLayout, KvPart
from base.messages import Prefill, Start
from decode_node.reservation import require_intact, reserved
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.paged_cache import PagedCache
from prefill_node.sender import KvSender
from tests.node_parts import work
from transfer.agent import TransferAgent
from transfer.shard import LocalShard, NodeKv

LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=4, block_size=16, dtype="float32")
NUM_BLOCKS = 6
GROUPS = {"1": (1, 1), "2 stages": (1, 2), "2 heads": (2, 1), "2 x 2": (2, 2), "4 heads": (4, 1)}


class Node:
    """The ranks of a node, each with an agent and a cache of its own."""

    def __init__(self, tensor, stages):
        layers, heads = 4 // stages, 4 // tensor
        self.parts = [
            KvPart(stage * layers, layers, place * heads, heads)
            for stage in range(stages)
            for place in range(tensor)
        ]
        self.pool = BlockPool(NUM_BLOCKS)
        self.agents, self.caches = [], []

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
                shards.append(LocalShard(part, layout, segment, agent, partial(block_sums, cache)))
                self.agents.append(agent)
                self.caches.append(cache)
            self.kv = NodeKv(LAYOUT, tuple(shards))
            yield self

    def of(self, whole, part):
        layers = slice(part.first_layer, part.first_layer + part.num_layers)
        return whole[:, layers, :, :, part.first_head : part.first_head + part.num_heads]


@pytest.mark.parametrize(
    ("source", "target"),
    [("2 x 2", "1"), ("1", "2 x 2"), ("2 stages", "2 heads"), ("4 heads", "2 x 2"), ("2 x 2", "2 x 2")],
)
async def test_every_rank_gets_its_part_of_every_block(source, target):
    prefill, decode = Node(*GROUPS[source]), Node(*GROUPS[target])
    whole = torch.randn(NUM_BLOCKS, *LAYOUT.block_shape)
    asked = work(num_tokens=40)
    async with prefill.running("prefill"), decode.running("decode"):
        for part, cache in zip(prefill.parts, prefill.caches, strict=True):
            cache.tensor.copy_(prefill.of(whole, part))
        computed = prefill.pool.allocate(3)
        async with reserved(decode.pool, decode.kv, asked) as reservation:
            told = reservation.told(asked.request_id)
            assert (told.grant is None) == (len(decode.parts) > 1)
            message = Prefill(asked, decode.agents[0].descriptor, told.grant, 0, None, told.ranks)
            sender = KvSender(prefill.kv, prefill.pool, message)
            async with asyncio.TaskGroup() as writes:
                sender.send_finished(writes, computed, 40)
            start = Start(asked.request_id, 1, sender.checksums, sender.parts)
            await reservation.close()
            await require_intact(decode.kv, reservation, start)
            for part, cache in zip(decode.parts, decode.caches, strict=True):
                arrived = cache.tensor[reservation.block_ids]
                assert torch.equal(arrived, decode.of(whole[computed], part))
            decode.caches[-1].tensor[reservation.block_ids[1], 0, 0, 3] += 1
            with pytest.raises(ChecksumError, match="block 1 of the prompt"):
                await require_intact(decode.kv, reservation, start)
            with pytest.raises(ChecksumError, match="checksums for 3 blocks"):
                await require_intact(decode.kv, reservation, Start("r", 1, start.checksums[1:], start.parts))
        assert decode.pool.num_held == 0
        assert [agent.num_grants for agent in decode.agents] == [0] * len(decode.agents)
        prefill.pool.release(computed)
        prefill.pool.check()
        assert prefill.pool.num_held == 0
