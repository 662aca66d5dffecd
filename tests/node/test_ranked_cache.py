"""Nodes of any ranks lend to nodes of any ranks: what comes is right, or is not taken in."""

import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
import torch

from base.checksum import CHECKSUM_KIND
from base.clock import SystemClock
from base.messages import Failed, Lend, Lent, Source
from kvstore.block_mover import ShardMover
from kvstore.engine_store import EngineStore
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool
from kvstore.store import Store
from node.own_cache import Lender, LentPrefix, RankedCache, SegmentCache
from prefill_node.prefix_loader import Prefix
from tests.kvstore.cluster import chain_of
from tests.manual_clock import ManualClock
from tests.rank_caches import GROUPS, LAYOUT, RankedNode, random_blocks

CHAIN = tuple(chain_of("abcd"))
PAIRS = [pair for pair in itertools.product(GROUPS, repeat=2) if pair != ("1", "1")]


def evict_all(pool):
    pool.release(pool.allocate(pool.num_available))


class LendingNode(RankedNode):
    """A node of several ranks with a store, or of one without."""

    async def begin(self, stack, name, group):
        await stack.enter_async_context(self.running(name))
        agent, self.store = self.agents[0], None
        if len(self.parts) == 1:
            self.own = SegmentCache(self.pool, self.caches[0], self.segments[0], agent)
        else:
            self.store = Store(agent, HostPool(8, BY_NAME["lru"], SystemClock()), LAYOUT.block_bytes)
            stack.push_async_callback(self.store.close)
            mover = ShardMover(self.kv, self.store, agent.descriptor, CHECKSUM_KIND)
            self.beside = EngineStore(self.pool, LAYOUT, mover, self.store, 1e9, ManualClock())
            self.own = RankedCache(self.beside, self.store, agent)
        self.sent = asyncio.Queue()
        self.lender = Lender(self.own, group, self.sent.put_nowait)

    def compute(self, whole, chain=CHAIN):
        """Have the KV of `chain`, and nobody hold it."""
        block_ids = self.pool.allocate(len(chain))
        for part, cache in zip(self.parts, self.caches, strict=True):
            cache.tensor[block_ids] = self.of(whole, part)[: len(chain)]
        for block_id, block_hash in zip(block_ids, chain, strict=True):
            self.pool.publish(block_id, block_hash)
        self.pool.release(block_ids)

    async def lent(self, first=0, chain=CHAIN):
        self.lender.lend(Lend("lend", chain, 60.0, first))
        told = await asyncio.wait_for(self.sent.get(), 60)
        if isinstance(told, Failed):
            return told
        assert isinstance(told, Lent)
        return Source(self.agents[0].descriptor, told.grant, told.checksums, first)

    async def load(self, source, chain=CHAIN):
        """Load what is missing; return how many blocks of `chain` are there then, all as in `whole`."""
        prefix = Prefix(self.pool, "r")
        prefix.block_ids += self.pool.match(chain)
        try:
            await prefix.load(chain, LentPrefix(self.own, source), ManualClock())
            return len(prefix.block_ids)
        finally:
            await prefix.close()

    def has(self, whole, count=4):
        held = self.pool.match(CHAIN[:count])
        self.pool.release(held)
        pairs = zip(self.parts, self.caches, strict=True)
        return len(held) == count and all(
            torch.equal(cache.tensor[held], self.of(whole, part)[:count]) for part, cache in pairs
        )

    async def check_nothing_is_held(self):
        self.lender.tasks.end_all()
        async with asyncio.timeout(60):
            await self.lender.tasks.idle()
        self.pool.check()
        assert self.pool.num_held == 0
        assert [agent.num_grants for agent in self.agents] == [0] * len(self.agents)
        if self.store is not None:
            self.store.check()
            books = self.store.pool.accounts()
            assert (books.in_transfer, books.held) == (0, 0)


@asynccontextmanager
async def two_nodes(lender, borrower):
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        nodes = []
        for name, kind in (("warm", lender), ("cold", borrower)):
            nodes.append(LendingNode(*GROUPS[kind]))
            await nodes[-1].begin(stack, name, group)
        warm, cold = nodes
        warm.whole = random_blocks()
        warm.compute(warm.whole)
        yield warm, cold
        for node in nodes:
            await node.check_nothing_is_held()


@pytest.mark.parametrize(("lender", "borrower"), PAIRS)
async def test_what_one_node_computed_another_has_by_its_own_ranks(lender, borrower):
    async with two_nodes(lender, borrower) as (warm, cold):
        assert await cold.load(await warm.lent()) == 4
        assert cold.has(warm.whole)
        # and goes on from there
        cold.lender.lend(Lend("on", CHAIN, 60.0))
        assert isinstance(await asyncio.wait_for(cold.sent.get(), 60), Lent)


async def test_only_what_is_missing_is_read_and_the_store_has_what_comes_before():
    async with two_nodes("2 stages", "2 x 2") as (warm, cold):
        cold.compute(warm.whole, CHAIN[:2])
        assert cold.store.match(CHAIN).num_blocks == 0
        assert await cold.load(await warm.lent(first=1)) == 4
        assert cold.has(warm.whole)
        assert cold.store.match(CHAIN).num_blocks == 4


async def test_a_gap_is_not_loaded_over():
    async with two_nodes("2 stages", "2 heads") as (warm, cold):
        assert await cold.load(await warm.lent(first=2)) == 0
        assert cold.store.match(CHAIN).num_blocks == 0


async def test_what_the_cache_forgot_is_lent_from_the_store():
    async with two_nodes("2 x 2", "1") as (warm, cold):
        await warm.beside.save_now(CHAIN)
        evict_all(warm.pool)
        assert await cold.load(await warm.lent()) == 4
        assert cold.has(warm.whole)


async def test_blocks_that_are_gone_are_not_lent():
    async with two_nodes("2 x 2", "1") as (warm, _):
        evict_all(warm.pool)
        assert (await warm.lent()).reason == "LostError"


@pytest.mark.parametrize("trouble", ["first checksum", "third checksum", "revoked"])
@pytest.mark.parametrize("lender", ["1", "2 stages"])
async def test_a_block_that_is_not_the_one_that_was_lent_is_kept_nowhere(lender, trouble, caplog):
    async with two_nodes(lender, "2 x 2") as (warm, cold):
        source = await warm.lent()
        if trouble == "revoked":
            await warm.agents[0].revoke(source.grant)
            right = 0
            assert await cold.load(source) == right
            assert "StaleError" in caplog.text
        else:
            right = 0 if trouble == "first checksum" else 2
            sums = list(source.checksums)
            sums[right] ^= 1
            assert await cold.load(replace(source, checksums=tuple(sums))) == right
        assert cold.has(warm.whole, right)
        assert cold.store.match(CHAIN).num_blocks == cold.pool.num_cached == right


async def test_a_load_that_is_cancelled_at_any_moment_holds_nothing():
    async with two_nodes("2 stages", "2 heads") as (warm, cold):
        source = await warm.lent()
        for num_turns in range(0, 90, 3):
            task = asyncio.ensure_future(cold.load(source))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert cold.pool.num_held == 0
            books = cold.store.pool.accounts()
            assert (books.in_transfer, books.held) == (0, 0)
            evict_all(cold.pool)
            await cold.store.delete(CHAIN)
        assert await cold.load(source) == 4
        assert cold.has(warm.whole)


async def test_without_a_store_nothing_is_lent():
    sent = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        Lender(None, group, sent.put_nowait).lend(Lend("lend", CHAIN, 60.0))
        assert (await sent.get()).reason == "LostError"
