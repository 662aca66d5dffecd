"""A prefix that another node holds is read from it, compared, kept, and computed where that fails."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from base.block_hash import hash_chain
from base.clock import SystemClock
from base.grants import Operation
from base.messages import Failed, Lend, Lent, Prefilled, Source
from decode_node.role import DecodeRole
from engine.block_sums import block_sums
from engine.step import arrivals_of
from kvstore.block_mover import SegmentMover
from kvstore.client import BlockCache
from kvstore.engine_store import EngineStore
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool
from kvstore.store import Store
from kvstore.wire import Member
from node.own_cache import Lender, LentPrefix, SegmentCache
from prefill_node.role import PrefillRole
from tests.kvstore.memory_directory import MemoryBoard, MemoryDirectory
from tests.manual_clock import ManualClock
from tests.node_parts import LAYOUT, ROOT, CountingRunner, hand_over, parts, work

CHAIN = hash_chain(range(100, 180), 16, ROOT)


@pytest.fixture
async def three():
    async with (
        parts(warm=PrefillRole, cold=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm = made["warm"]
        warm.lender = Lender(warm.own, group, warm.send)
        warm.group = group
        yield warm, made["cold"], made["decode"]
        warm.lender.tasks.end_all()


@asynccontextmanager
async def with_store(part, group):
    """Give a node a store of its own: its prefill role saves to it, loads from it and lends it.

    Its clock stands still: whether loading is worth it is not a matter of how busy this machine is.
    """
    pool = HostPool(8, BY_NAME["lru"], SystemClock())
    part.store = Store(part.agent, pool, LAYOUT.block_bytes)
    peer = part.agent.descriptor
    member = Member(peer.node_id, peer.epoch, "here", "host", peer, LAYOUT.block_bytes)
    cache = BlockCache(
        part.agent, MemoryDirectory(MemoryBoard(), member), SystemClock(), (member, part.store)
    )
    part.store.join(cache.directory)
    mover = SegmentMover(cache, part.segment, LAYOUT.block_bytes, partial(block_sums, part.cache))
    part.beside = EngineStore(part.pool, LAYOUT, mover, part.store, 1e9, ManualClock())
    own = SegmentCache(part.pool, part.cache, part.segment, part.agent, part.store)
    lent = partial(LentPrefix, own)
    part.role = PrefillRole(part.loop, part.kv, group, part.send, SystemClock(), lent, part.beside)
    part.lender = Lender(own, group, part.send)
    saving = group.create_task(part.beside.run())
    try:
        yield
    finally:
        saving.cancel()
        await asyncio.wait([saving])


async def saved(part, count):
    async with asyncio.timeout(60):
        while part.beside.num_saved < count:
            await asyncio.sleep(0)


def forget(part):
    """Let the engine's cache be filled with something else."""
    part.pool.release(part.pool.allocate(part.pool.num_blocks))


async def test_a_prefix_that_the_cache_forgot_comes_back_from_the_store(three):
    warm, _, decode = three
    async with with_store(warm, warm.group):
        expected = await prefilled(warm, decode, work(num_tokens=80))
        await saved(warm, 5)
        forget(warm)
        answer = await prefilled(warm, decode, work(num_tokens=80, name="again"))
        assert answer.num_cached_tokens == 64
        assert answer.checksums == expected.checksums
        forget(warm)
        warm.store.segment.memory[LAYOUT.block_bytes] ^= 1
        answer = await prefilled(warm, decode, work(num_tokens=80, name="damaged"))
        assert answer.num_cached_tokens == 16
        assert answer.checksums == expected.checksums
    warm.check_nothing_is_held()


async def test_what_another_node_keeps_is_evicted_first_though_it_was_saved_since(three):
    warm, _, decode = three
    newer = work(num_tokens=32, name="newer")
    newer = newer._replace(token_ids=newer.token_ids[::-1], evict_first=True)
    async with with_store(warm, warm.group):
        for number, asked in enumerate((work(num_tokens=32), newer)):
            await prefilled(warm, decode, asked)
            await saved(warm, 2 + 2 * number)
        async with asyncio.timeout(60):
            while warm.pool.num_held:
                await asyncio.sleep(0)
        warm.pool.release(warm.pool.allocate(warm.pool.num_blocks - 2))
        assert len(warm.pool.match(hash_chain(work(num_tokens=32).token_ids, 16, ROOT))) == 2


async def test_what_the_cache_forgot_is_lent_from_the_store(three):
    warm, cold, decode = three
    async with with_store(warm, warm.group):
        expected = await prefilled(warm, decode, work(num_tokens=80))
        await saved(warm, 5)
        forget(warm)
        answer = await prefilled(cold, decode, work(num_tokens=80), await lent(warm, 0, 4))
        assert answer.num_cached_tokens == 64
        assert answer.checksums == expected.checksums
        warm.lender.tasks.end("lend")
        await warm.lender.tasks.idle()
    assert warm.store.pool.accounts().held == 0
    for part in (warm, cold):
        part.check_nothing_is_held()


class WaitingRunner(CountingRunner):
    """Computes layer by layer, and waits before each for its part of a prefix."""

    prefix_parts = (1,) * LAYOUT.num_layers

    def execute(self, plan):
        for layer in range(LAYOUT.num_layers):
            for arrivals in arrivals_of(plan):
                arrivals.wait(layer + 1)
                self.num_waits += 1
            self.compute(plan, layer)
        return self.sampled(plan)

    num_waits = 0


async def test_a_prompt_is_computed_while_its_prefix_comes_layer_by_layer():
    async with (
        parts(WaitingRunner, warm=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm, decode = made["warm"], made["decode"]
        async with with_store(warm, group):
            expected = await prefilled(warm, decode, work(num_tokens=80))
            await saved(warm, 5)
            forget(warm)
            answer = await prefilled(warm, decode, work(num_tokens=80, name="again"))
            assert warm.runner.num_waits == LAYOUT.num_layers
            assert answer.num_cached_tokens == 64
            assert answer.checksums == expected.checksums
            assert len(warm.pool.match(CHAIN)) == 5, "what came and what was computed are published"
            warm.pool.release(warm.pool.match(CHAIN) * 2)
            forget(warm)
            warm.store.segment.memory[LAYOUT.block_bytes] ^= 1
            answer = await prefilled(warm, decode, work(num_tokens=80, name="damaged"))
            assert warm.runner.num_waits == 2 * LAYOUT.num_layers, "it was computed from it, and again"
            assert answer.num_cached_tokens == 16
            assert answer.checksums == expected.checksums
        warm.check_nothing_is_held()


class LateSource:
    """Blocks of `work`'s prompt, of which the last layer comes when the test lets it."""

    def __init__(self, cache):
        self._cache = cache
        self.may_end = asyncio.Event()

    async def reach(self, chain, first):
        return len(chain)

    async def load(self, chain, block_ids, first, stripes=None):
        for layer in range(LAYOUT.num_layers):
            for block, block_id in enumerate(block_ids, first):
                self._cache.heads()[:, layer][block_id] = sum(range(100, 100 + 16 * (block + 1)))
            stripes.on_arrived(layer + 1)
            await self.may_end.wait()
        return len(block_ids)


async def test_a_prefix_is_not_sent_before_it_is_there():
    async with (
        parts(WaitingRunner, warm=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm, decode = made["warm"], made["decode"]
        expected = await prefilled(warm, decode, work(num_tokens=80))
        forget(warm)
        late = LateSource(warm.cache)
        warm.role = PrefillRole(warm.loop, warm.kv, group, warm.send, SystemClock(), None, late)
        late.computed = late.offer = lambda *_: None
        answering = group.create_task(prefilled(warm, decode, work(num_tokens=80, name="again")))
        async with asyncio.timeout(60):
            while warm.runner.num_waits < 1:
                await asyncio.sleep(0)
        for _ in range(10):  # in which what is sent would be summed
            await block_sums(warm.cache, [0])
        late.may_end.set()
        assert (await answering).checksums == expected.checksums
        warm.check_nothing_is_held()


async def test_a_request_that_ends_while_its_prefix_comes_leaves_nothing():
    async with (
        parts(WaitingRunner, warm=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm, decode = made["warm"], made["decode"]
        async with with_store(warm, group):
            await prefilled(warm, decode, work(num_tokens=80))
            await saved(warm, 5)
            for num_turns in range(0, 60, 3):
                forget(warm)
                asked = work(num_tokens=80, name=f"r{num_turns}")
                offsets = [LAYOUT.offset(block) for block in range(5)]
                grant = decode.agent.grant(decode.segment, offsets, LAYOUT.block_bytes, Operation.WRITE, 60.0)
                hand_over(warm.role, asked, grant, decode.agent.descriptor)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                warm.role.tasks.end(asked.request_id)
                async with asyncio.timeout(60):
                    await warm.role.tasks.idle()
                    while warm.pool.num_held:
                        await asyncio.sleep(0)
                await decode.agent.revoke(grant)
                warm.check_nothing_is_held()


async def prefilled(part, decode, asked, source=None):
    num_blocks = LAYOUT.num_blocks(len(asked.token_ids))
    offsets = [LAYOUT.offset(block) for block in range(num_blocks)]
    grant = decode.agent.grant(decode.segment, offsets, LAYOUT.block_bytes, Operation.WRITE, 60.0)
    hand_over(part.role, asked, grant, decode.agent.descriptor, source=source)
    answer = await part.said(Prefilled)
    await part.role.tasks.idle()
    await decode.agent.revoke(grant)
    part.sent.clear()
    return answer


async def lent(warm, first, end, name="lend"):
    warm.lender.lend(Lend(name, tuple(CHAIN[:end]), 60.0, first))
    told = await warm.said(Lent)
    return Source(warm.agent.descriptor, told.grant, told.checksums, first)


async def test_lent_blocks_are_not_computed_again_and_stay(three):
    warm, cold, decode = three
    expected = await prefilled(warm, decode, work(num_tokens=80))
    source = await lent(warm, 0, 4)
    answer = await prefilled(cold, decode, work(num_tokens=80), source)
    assert answer.num_cached_tokens == 64
    assert answer.checksums == expected.checksums
    warm.lender.tasks.end("lend")
    again = await prefilled(cold, decode, work(num_tokens=80, name="again"))
    assert again.num_cached_tokens == 64
    await warm.lender.tasks.idle()
    for part in (warm, cold):
        part.check_nothing_is_held()


async def test_only_what_is_missing_is_read(three):
    warm, cold, decode = three
    await prefilled(warm, decode, work(num_tokens=80))
    await prefilled(cold, decode, work(num_tokens=33))
    answer = await prefilled(cold, decode, work(num_tokens=80, name="b"), await lent(warm, 1, 4))
    assert answer.num_cached_tokens == 64


@pytest.mark.parametrize("trouble", ["revoked", "damaged", "peer gone", "gap"])
async def test_a_prefix_that_cannot_be_loaded_is_computed(three, trouble):
    warm, cold, decode = three
    expected = await prefilled(warm, decode, work(num_tokens=80))
    source = await lent(warm, 2 if trouble == "gap" else 0, 4)
    if trouble == "revoked":
        await warm.agent.revoke(source.grant)
    elif trouble == "damaged":
        source = replace(source, checksums=(source.checksums[0] ^ 1, *source.checksums[1:]))
    elif trouble == "peer gone":
        source = replace(source, peer=replace(source.peer, epoch=99))
    answer = await prefilled(cold, decode, work(num_tokens=80), source)
    assert answer.num_cached_tokens == 0
    assert answer.checksums == expected.checksums
    cold.check_nothing_is_held()


async def test_blocks_that_are_gone_are_not_lent(three):
    warm, _, _ = three
    warm.lender.lend(Lend("lend", tuple(CHAIN[:2]), 60.0))
    assert (await warm.said(Failed)).reason == "LostError"


async def test_a_loan_ends_by_itself(three):
    warm, _, decode = three
    await prefilled(warm, decode, work(num_tokens=80))
    warm.lender.lend(Lend("lend", tuple(CHAIN[:2]), 0.05))
    await warm.said(Lent)
    async with asyncio.timeout(60):
        await warm.lender.tasks.idle()
    warm.check_nothing_is_held()


async def test_a_loan_is_none_of_what_sequences_share(three):
    warm, _, decode = three
    await prefilled(warm, decode, work(num_tokens=80))
    first = warm.pool.match(CHAIN[:2])
    await lent(warm, 0, 2)
    assert not warm.pool.num_shared
    second = warm.pool.match(CHAIN[:2])
    assert warm.pool.num_shared == 2
    warm.lender.tasks.end("lend")
    await warm.lender.tasks.idle()
    assert warm.pool.num_shared == 2
    for block_ids in (first, second):
        warm.pool.release(block_ids)
    assert not warm.pool.num_shared
    warm.check_nothing_is_held()
