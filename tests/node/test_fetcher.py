"""A replica is read from its lender, compared and kept; one that cannot be had is told, and holds nothing."""

import asyncio
from dataclasses import replace

import pytest

from base.block_hash import hash_chain
from base.messages import Failed, Fetch, Fetched, Lend, Lent, Prefilled, Source
from decode_node.role import DecodeRole
from node.fetcher import Fetcher
from node.lender import Lender
from prefill_node.role import PrefillRole
from tests.node_parts import LAYOUT, ROOT, parts, work
from tests.prefill_node.test_prefix_loader import prefilled

CHAIN = tuple(hash_chain(range(100, 180), 16, ROOT))


@pytest.fixture
async def pair():
    async with (
        parts(warm=PrefillRole, cold=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm, cold = made["warm"], made["cold"]
        warm.lender = Lender(warm.own, group, warm.send)
        cold.fetcher = Fetcher(cold.own, group, cold.send)
        assert isinstance(await prefilled(warm, made["decode"], work(num_tokens=80)), Prefilled)
        yield warm, cold
        warm.lender.tasks.end_all()
        cold.fetcher.tasks.end_all()


async def lent(warm, first=0):
    warm.lender.lend(Lend("lend", CHAIN, 10.0, first))
    answer = await warm.said(Lent)
    return Source(warm.agent.descriptor, answer.grant, answer.checksums, first)


async def test_a_fetched_chain_is_findable_and_held_by_nobody(pair):
    warm, cold = pair
    cold.fetcher.fetch(Fetch("copy", CHAIN, await lent(warm), 1))
    assert (await cold.said(Fetched)).num_blocks == len(CHAIN)
    await cold.fetcher.tasks.idle()
    assert all(name in cold.pool for name in CHAIN)
    cold.check_nothing_is_held()
    # and given up again, all but what somebody holds
    held = cold.pool.match(CHAIN[:1])
    assert cold.pool.forget(CHAIN) == len(CHAIN) - 1
    cold.pool.check()
    cold.pool.release(held)
    assert cold.pool.forget(CHAIN) == 1
    assert cold.pool.take_events() == ([], []), "what came and went between two calls is no news"
    cold.check_nothing_is_held()


async def test_damaged_blocks_are_refused(pair):
    warm, cold = pair
    source = await lent(warm)
    damaged = replace(source, checksums=(source.checksums[0] ^ 1, *source.checksums[1:]))
    cold.fetcher.fetch(Fetch("copy", CHAIN, damaged, 1))
    assert (await cold.said(Failed)).reason == "ChecksumError"
    await cold.fetcher.tasks.idle()
    assert not any(name in cold.pool for name in CHAIN)
    cold.check_nothing_is_held()


async def test_what_has_no_room_is_not_fetched(pair):
    warm, cold = pair
    held = cold.pool.allocate(LAYOUT.num_blocks(9 * 16))
    cold.fetcher.fetch(Fetch("copy", CHAIN, await lent(warm), 1))
    assert (await cold.said(Failed)).reason == "CapacityError"
    await cold.fetcher.tasks.idle()
    cold.pool.release(held)
    cold.check_nothing_is_held()
