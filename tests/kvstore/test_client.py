"""Save, match and load between stores and clients, by real agents and servers on loopback."""

import asyncio

import pytest

from base.errors import UnavailableError
from kvstore.access import RemoteAccess
from tests.kvstore.cluster import BLOCK_BYTES, bytes_of, chain_of, load, running_cluster, save


@pytest.fixture
async def cluster():
    async with running_cluster() as running:
        yield running


def all_checked(*nodes):
    for node in nodes:
        node.store.check()
        books = node.store.pool.accounts()
        assert (books.in_transfer, books.held) == (0, 0)


@pytest.mark.parametrize("transports", [("tcp",), ("shm", "tcp")], ids=["tcp", "shm"])
async def test_what_one_node_saves_another_loads(cluster, transports):
    one = await cluster.node("one", transports=transports)
    two = await cluster.node("two", transports=transports)
    assert await save(one.cache, one.agent, "abcde") == 5
    assert await two.cache.match(chain_of("abcdef")) == 5
    assert await load(two.cache, two.agent, "abcdef") == 5
    assert await load(two.cache, two.agent, "abcdef", first=3) == 2
    all_checked(one, two)


async def test_a_save_that_exists_moves_no_bytes(cluster):
    one = await cluster.node("one")
    assert await save(one.cache, one.agent, "abc") == 3
    assert await save(one.cache, one.agent, "abcd") == 1
    assert await save(one.cache, one.agent, "abcd") == 0
    all_checked(one)


async def test_an_outside_client_saves_and_loads(cluster):
    one = await cluster.node("one")
    cache, agent, _ = await cluster.client()
    assert await save(cache, agent, "abc") == 3
    assert await load(cache, agent, "abc") == 3
    assert await load(one.cache, one.agent, "abc") == 3
    all_checked(one)


async def test_a_tail_without_its_head_is_not_saved(cluster):
    one = await cluster.node("one")
    assert await save(one.cache, one.agent, "abc", first=1) == 0
    assert await save(one.cache, one.agent, "a") == 1
    assert await save(one.cache, one.agent, "abc", first=1) == 2
    all_checked(one)


async def test_a_chain_is_put_together_from_what_several_hold(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, one.agent, "ab")
    await save(two.cache, two.agent, "abcd")
    cache, agent, _ = await cluster.client()
    assert await load(cache, agent, "abcde") == 4
    await two.die()
    assert await load(cache, agent, "abcde") == 2
    all_checked(one)


async def test_a_holder_that_died_is_left_for_the_next(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, one.agent, "abc")
    await save(two.cache, two.agent, "abc")
    cache, agent, _ = await cluster.client()
    await one.die()
    assert await load(cache, agent, "abc") == 3
    all_checked(two)


async def test_when_nobody_is_left_nothing_is_loaded_and_nothing_raised(cluster):
    one = await cluster.node("one")
    await save(one.cache, one.agent, "abc")
    cache, agent, _ = await cluster.client()
    await one.die()
    assert await load(cache, agent, "abc") == 0
    assert await save(cache, agent, "xyz") == 0


async def test_a_holder_that_forgot_is_no_failure(cluster):
    one, two = await cluster.node("one", num_blocks=3), await cluster.node("two")
    await save(one.cache, one.agent, "abc")
    cluster.board.holders[chain_of("abcd")[3]] = {one.member.epoch: None}
    assert await load(two.cache, two.agent, "abcd") == 3


async def test_damaged_bytes_are_never_returned_and_their_holder_forgets_them(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, one.agent, "abcd")
    chain = chain_of("abcd")
    offset = one.store.pool.block_id(chain[2]) * BLOCK_BYTES
    one.store.segment.memory[offset + 77] ^= 1
    assert await load(two.cache, two.agent, "abcd") == 2
    assert (two.cache.num_damaged, one.store.num_damaged) == (1, 1)
    assert await two.cache.match(chain) == 2
    assert await save(one.cache, one.agent, "abcd") == 2
    assert await load(two.cache, two.agent, "abcd") == 4
    all_checked(one)


async def test_a_writer_that_died_within_a_put_leaves_no_block_behind(cluster):
    one = await cluster.node("one")
    access = RemoteAccess(one.member.address)
    reserved = await access.reserve(chain_of("abc"), "")
    assert reserved.missing == (0, 1, 2)
    assert one.store.pool.accounts().in_transfer == 3
    await access.close()
    one.clock.advance(31)
    await one.store.tick()
    assert one.store.pool.accounts().free == 16
    assert one.agent.num_grants == 0


async def test_a_reader_that_died_within_a_get_holds_nothing_after_its_lease(cluster):
    one = await cluster.node("one")
    await save(one.cache, one.agent, "abc")
    access = RemoteAccess(one.member.address)
    leased = await access.lease(chain_of("abc"), 0)
    assert leased.num_blocks == 3
    await access.close()
    assert one.store.pool.accounts().held == 3
    one.clock.advance(31)
    await one.store.tick()
    all_checked(one)
    assert one.agent.num_grants == 0


@pytest.mark.parametrize("after", range(8))
async def test_a_load_cancelled_anywhere_holds_nothing(cluster, after):
    one = await cluster.node("one")
    await save(one.cache, one.agent, "abcdef")
    cache, agent, _ = await cluster.client()
    task = asyncio.ensure_future(load(cache, agent, "abcdef"))
    await turns(1 + 3 * after)
    task.cancel()
    await asyncio.wait([task])
    assert await eventually(lambda: one.store.pool.accounts().held == 0)
    assert await load(cache, agent, "abcdef") == 6


@pytest.mark.parametrize("after", range(8))
async def test_a_save_cancelled_anywhere_sets_nothing_aside(cluster, after):
    one = await cluster.node("one")
    cache, agent, _ = await cluster.client()
    task = asyncio.ensure_future(save(cache, agent, "abcdef"))
    await turns(1 + 3 * after)
    task.cancel()
    await asyncio.wait([task])
    assert await eventually(lambda: one.store.pool.accounts().in_transfer == 0)
    one.store.check()


async def test_a_pinned_chain_outlives_pressure(cluster):
    one = await cluster.node("one", num_blocks=4)
    cache, agent, _ = await cluster.client()
    await save(cache, agent, "ab")
    ticket, num_blocks = await cache.pin(chain_of("ab"), 0.0, one.member)
    assert num_blocks == 2
    await save(cache, agent, "wxyz")
    assert await load(cache, agent, "ab") == 2
    await cache.unpin(ticket, one.member)
    await save(cache, agent, "pqrst")
    assert await load(cache, agent, "ab") == 0
    all_checked(one)


async def test_deleting_reaches_every_replica(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, one.agent, "ab")
    await save(two.cache, two.agent, "ab")
    cache, _, _ = await cluster.client()
    assert await cache.delete(chain_of("ab")) == 4
    assert await cache.match(chain_of("ab")) == 0


async def test_a_member_that_does_not_answer_is_named_unavailable():
    access = RemoteAccess("127.0.0.1:1")
    with pytest.raises(UnavailableError):
        await access.match(chain_of("a"))
    await access.close()


# --- with a disk below -------------------------------------------------------------------


async def test_what_memory_has_no_room_for_is_read_back_from_disk(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.25)
    cache, agent, _ = await cluster.client()
    for path in ("abcd", "efgh", "ijkl"):
        assert await save(cache, agent, path) == 4
        await one.store.tick()
    found = one.store.match(chain_of("abcd"))
    assert (found.num_blocks, found.num_in_memory) == (4, 0)
    assert await load(cache, agent, "abcd") == 4
    assert await load(cache, agent, "efgh") == 4
    all_checked(one)


async def test_a_damaged_record_on_disk_is_a_miss_from_there_on(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.05)
    cache, agent, _ = await cluster.client()
    await save(cache, agent, "abcdef")
    await one.store.tick()
    file = tmp_path / "blocks.slots"
    data = bytearray(file.read_bytes())
    at = data.index(bytes_of(chain_of("abcdef")[3])[:64])
    data[at + 100] ^= 1
    file.write_bytes(data)
    assert await load(cache, agent, "abcdef") == 3
    all_checked(one)


async def test_two_readers_of_one_chain_read_it_from_disk_once(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.05)
    cache, agent, _ = await cluster.client()
    await save(cache, agent, "abcdef")
    await one.store.tick()
    assert await asyncio.gather(*(load(cache, agent, "abcdef") for _ in range(3))) == [6, 6, 6]
    all_checked(one)


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0.0005)


async def eventually(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)
    return True
