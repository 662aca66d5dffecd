"""KV that several ranks have goes to several others, each to each, and is verified part by part."""

import asyncio

import pytest
import torch

from base.clock import SystemClock
from base.errors import ChecksumError
from base.messages import Granted, Start
from decode_node.reservation import require_intact, reserved
from prefill_node.sender import Destination, KvSender
from tests.node_parts import work
from tests.rank_caches import GROUPS, RankedNode, random_blocks


@pytest.mark.parametrize(
    ("source", "target"),
    [("2 x 2", "1"), ("1", "2 x 2"), ("2 stages", "2 heads"), ("4 heads", "2 x 2"), ("2 x 2", "2 x 2")],
)
async def test_every_rank_gets_its_part_of_every_block(source, target):
    prefill, decode = RankedNode(*GROUPS[source]), RankedNode(*GROUPS[target])
    whole = random_blocks()
    asked = work(num_tokens=40)
    async with prefill.running("prefill"), decode.running("decode"):
        for part, cache in zip(prefill.parts, prefill.caches, strict=True):
            cache.tensor.copy_(prefill.of(whole, part))
        computed = prefill.pool.allocate(3)
        async with reserved(decode.pool, decode.kv, asked) as reservation:
            told = reservation.answer(asked.request_id)
            assert (told.grant is None) == (len(decode.parts) > 1)
            destination = Destination()
            where = Granted(asked.request_id, 0, decode.agents[0].descriptor, told.grant, told.ranks)
            destination.granted(where)
            sender = KvSender(prefill.kv, prefill.pool, asked, destination, SystemClock())
            async with asyncio.TaskGroup() as writes:
                sender.send_finished(writes.create_task, computed, 40)
            start = Start(asked.request_id, 1, sender.checksums, sender.parts)
            await reservation.close()
            await require_intact(decode.kv, reservation, start)
            for part, cache in zip(decode.parts, decode.caches, strict=True):
                arrived = cache.tensor[reservation.block_ids]
                assert torch.equal(arrived, decode.of(whole[computed], part))
            decode.caches[-1].tensor[reservation.block_ids[1], 3] += 1
            with pytest.raises(ChecksumError, match="block 1 of the prompt"):
                await require_intact(decode.kv, reservation, start)
            with pytest.raises(ChecksumError, match="checksums for 3 blocks"):
                await require_intact(decode.kv, reservation, Start("r", 1, start.checksums[1:], start.parts))
        assert decode.pool.num_held == 0
        assert [agent.num_grants for agent in decode.agents] == [0] * len(decode.agents)
        prefill.pool.release(computed)
        prefill.pool.check()
        assert prefill.pool.num_held == 0
