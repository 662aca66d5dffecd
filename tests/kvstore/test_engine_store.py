"""What an engine's cache held is saved behind its back, and comes back when it has forgotten it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from base.block_hash import BlockHash
from base.checksum import sum_of_words
from base.errors import ChecksumError, UnavailableError
from kvstore.engine_store import MAX_OFFERS, EngineStore
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, running_cluster
from tests.kvstore.engine_beside import LAYOUT, NUM_BLOCKS, ROOT, Beside, Engine, contents
from tests.kvstore.fake_gpu import FakeGpu


@asynccontextmanager
async def beside(bytes_per_s=1e9, **node):
    async with running_cluster() as cluster:
        made = Beside(await cluster.node("one", **node), bytes_per_s)
        made.cluster = cluster
        saving = asyncio.ensure_future(made.store.run())
        yield made
        saving.cancel()
        await asyncio.wait([saving])
        made.node.store.check()


async def test_what_was_offered_comes_back_when_the_engine_has_forgotten_it():
    async with beside() as one:
        one.engine.compute("abcdef")
        one.store.offer(chain_of("abcdef"), ROOT)
        await one.saved(6)
        one.engine.forget()
        assert await one.load("abcdefgh") == contents("abcdef")
        assert await one.load("abcdef", first=4) == contents("abcdef", 4)
        assert one.store.num_loaded == 8


async def test_only_what_is_new_is_saved():
    async with beside() as one:
        one.engine.compute("abcd")
        one.store.offer(chain_of("ab"), ROOT)
        await one.saved(2)
        one.store.offer(chain_of("abcd"), ROOT)
        await one.saved(4)
        assert one.store.num_saved == 4


async def test_saving_keeps_to_its_bandwidth():
    bytes_per_s = 20.0 * BLOCK_BYTES
    async with beside(bytes_per_s) as one:
        one.engine.compute("abcdefg")
        one.store.offer(chain_of("abcdefg"), ROOT)
        await one.saved(7)
        assert max(one.paused_s) <= 2 / 20
        assert sum(one.paused_s) == pytest.approx(7 / 20)


async def test_what_the_engine_forgot_before_its_turn_is_dropped():
    async with beside() as one:
        one.store.offer(chain_of("abc"), ROOT)
        await one.saved(3)
        assert (one.store.num_saved, one.store.num_dropped) == (0, 3)


class Failing:
    """A way into the block cache that raises once, at one of its calls."""

    def __init__(self, mover, call, error):
        self.mover = mover
        self.plan = {call: error}

    async def num_saved(self, chain):
        self.fail("num_saved")
        return await self.mover.num_saved(chain)

    async def save(self, *args):
        self.fail("save")
        return await self.mover.save(*args)

    def fail(self, call):
        if (error := self.plan.pop(call, None)) is not None:
            raise error


@pytest.mark.parametrize(
    ("call", "error"), [("num_saved", UnavailableError("its home is gone")), ("save", ChecksumError("bytes"))]
)
async def test_an_offer_that_fails_is_dropped_and_the_next_is_saved(call, error, caplog):
    async with running_cluster() as cluster:
        one = Beside(await cluster.node("one"), 1e9)
        mover = Failing(one.mover, call, error)
        one.store = EngineStore(one.engine, LAYOUT, mover, one.node.store, 1e9, one.node.clock, one.pause)
        one.engine.compute("abc")
        one.store.offer(chain_of("abc"), ROOT)
        one.store.offer(chain_of("ab"), ROOT)
        saving = asyncio.ensure_future(one.store.run())
        await one.saved(5)
        assert (one.store.num_saved, one.store.num_dropped) == (2, 3)
        assert str(error) in caplog.text
        assert not saving.done()
        saving.cancel()
        await asyncio.wait([saving])


async def test_with_quotas_a_tenants_blocks_push_out_its_own_alone():
    async with running_cluster() as cluster:
        node = await cluster.node("one", num_blocks=4, tenant_quota=0.5)
        one = Beside(node, 1e9, has_quotas=True)
        saving = asyncio.ensure_future(one.store.run())
        one.engine.compute("ab")
        one.store.offer(chain_of("ab"), ROOT)
        await one.saved(2)
        one.engine.forget()
        one.engine.compute("xyz")
        one.store.offer(chain_of("xyz"), BlockHash(b"another tenant.."))
        await one.saved(5)
        saving.cancel()
        await asyncio.wait([saving])
        assert await node.cache.num_saved(chain_of("ab")) == 2
        assert await node.cache.num_saved(chain_of("xyz")) == 2


async def test_offers_have_a_bound_and_the_oldest_is_dropped():
    async with running_cluster() as cluster:
        idle = Beside(await cluster.node("one"), 1e9)
        for number in range(MAX_OFFERS + 2):
            idle.store.offer(chain_of(f"{number:05}"), ROOT)
        idle.store.offer(chain_of("99999"), ROOT)
        assert idle.store.num_dropped == 3 * 5


async def test_a_store_that_is_full_drops_the_tail_and_keeps_the_head():
    async with beside(num_blocks=3) as one:
        one.engine.compute("abcdef")
        one.store.offer(chain_of("abcdef"), ROOT)
        await one.saved(6)
        assert await one.node.cache.num_saved(chain_of("abcdef")) == 3


async def test_another_nodes_blocks_are_loaded_too():
    async with beside() as one:
        one.engine.compute("abc")
        one.store.offer(chain_of("abc"), ROOT)
        await one.saved(3)
        two = Beside(await one.cluster.node("two"), 1e9)
        assert await two.load("abc") == contents("abc")


async def test_a_damaged_block_ends_what_is_loaded():
    async with beside() as one:
        one.engine.compute("abcd")
        one.store.offer(chain_of("abcd"), ROOT)
        await one.saved(4)
        block_id = one.node.store.pool.record(chain_of("abc")[2]).block_id
        one.node.store.segment.memory[block_id * BLOCK_BYTES] ^= 1
        assert await one.load("abcd") == contents("ab")


async def test_what_is_sooner_computed_is_not_loaded():
    async with beside() as one:
        one.engine.compute("ab")
        one.store.offer(chain_of("ab"), ROOT)
        await one.saved(2)
        slow = EngineStore(one.engine, LAYOUT, one.mover, one.node.store, 1e9, TickingClock())
        slow.computed(1000, 0.1)
        for _ in range(2):
            assert await slow.reach(chain_of("ab"), 0) == 2
            assert await slow.load(chain_of("ab"), [6, 7], 0) == 2
        assert await slow.reach(chain_of("ab"), 0) == 0


class Unending:
    """A way into the block cache that finds all and never loads any of it."""

    async def match(self, chain):
        return len(chain)

    async def load(self, *args):
        await asyncio.get_running_loop().create_future()


async def test_a_place_whose_loads_hang_until_they_are_cancelled_is_left():
    async with beside() as one:
        hung = EngineStore(one.engine, LAYOUT, Unending(), one.node.store, 1e9, TickingClock())
        hung.computed(1000, 0.1)
        for _ in range(2):
            assert await hung.reach(chain_of("ab"), 0) == 2
            loading = asyncio.ensure_future(hung.load(chain_of("ab"), [6, 7], 0))
            await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait([loading])
            assert loading.cancelled()
        assert await hung.reach(chain_of("ab"), 0) == 0


# --- beside a GPU ------------------------------------------------------------------------


@asynccontextmanager
async def beside_a_gpu(cluster, name="one", **node):
    gpu = FakeGpu(NUM_BLOCKS * BLOCK_BYTES)
    made = await cluster.node(name, transports=("shm", "tcp"), wrap=gpu.wrap, **node)
    engine = Engine(gpu.segment(made.agent), gpu.memory, sum_of_words)
    one = Beside(made, 1e9, engine=engine)
    one.gpu = gpu
    saving = asyncio.ensure_future(one.store.run())
    yield one
    saving.cancel()
    await asyncio.wait([saving])
    made.store.check()


async def test_blocks_of_a_gpu_come_back_to_it():
    async with running_cluster() as cluster, beside_a_gpu(cluster) as one:
        one.engine.compute("abcdef")
        one.store.offer(chain_of("abcdef"), ROOT)
        await one.saved(6)
        one.engine.forget()
        assert await one.load("abcdefgh") == contents("abcdef")
        assert one.gpu.num_moved == 2 * 6 * BLOCK_BYTES
        assert one.store.num_loaded == 6


async def test_blocks_of_a_gpu_come_back_from_disk_and_from_another_node(tmp_path):
    limits = {"num_blocks": 8, "folder": tmp_path, "high_watermark": 0.5, "low_watermark": 0.05}
    async with running_cluster() as cluster, beside_a_gpu(cluster, **limits) as one:
        one.engine.compute("abcdef")
        one.store.offer(chain_of("abcdef"), ROOT)
        await one.saved(6)
        await one.node.store.tick()
        assert one.node.store.match(chain_of("abcdef")).num_in_memory == 0
        one.engine.forget()
        assert await one.load("abcdef") == contents("abcdef")
        async with beside_a_gpu(cluster, "two") as two:
            assert await two.load("abcdef") == contents("abcdef")


async def test_a_block_of_a_gpu_that_was_damaged_in_memory_is_found_out_and_forgotten():
    async with running_cluster() as cluster, beside_a_gpu(cluster) as one:
        one.engine.compute("abcd")
        one.store.offer(chain_of("abcd"), ROOT)
        await one.saved(4)
        block_id = one.node.store.pool.record(chain_of("abc")[2]).block_id
        one.node.store.segment.memory[block_id * BLOCK_BYTES] ^= 1
        one.engine.forget()
        assert await one.load("abcd") == contents("ab")
        assert one.node.store.num_damaged == 1
        assert await one.node.cache.match(chain_of("abcd")) == 2


class TickingClock:
    """Each look at it is a second after the one before."""

    def __init__(self):
        self.seconds = 0.0

    def now_s(self):
        self.seconds += 1.0
        return self.seconds
