"""Save, match and load between stores and clients, by real agents and servers on loopback."""

import asyncio
import random
from dataclasses import replace

import pytest

from base.checksum import checksum
from base.clock import SystemClock
from base.errors import UnavailableError
from base.grants import Operation
from bench.faults.transport import Fault, FaultyTransport
from kvstore.access import RemoteAccess
from kvstore.context import private_segment
from kvstore.peers import PeerDirectory
from kvstore.service import StoreService
from kvstore.store import Leased, OpenPut
from tests.kvstore.cancelled import CancelledAt
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
    assert await save(one.cache, "abcde") == 5
    assert await two.cache.match(chain_of("abcdef")) == 5
    assert await load(two.cache, "abcdef") == 5
    assert await load(two.cache, "abcdef", first=3) == 2
    all_checked(one, two)


async def test_a_save_that_exists_moves_no_bytes(cluster):
    one = await cluster.node("one")
    assert await save(one.cache, "abc") == 3
    assert await save(one.cache, "abcd") == 1
    assert await save(one.cache, "abcd") == 0
    all_checked(one)


async def test_an_outside_client_saves_and_loads(cluster):
    one = await cluster.node("one")
    cache, _ = await cluster.client()
    assert await save(cache, "abc") == 3
    assert await load(cache, "abc") == 3
    assert await load(one.cache, "abc") == 3
    all_checked(one)


class GenerousAccess:
    """A store's, which lends ranges that are not as long as a block."""

    def __init__(self, node, length):
        self._node = node
        self._length = length

    def _grant(self, operation):
        grant = self._node.agent.grant(self._node.store.segment, [0], 2 * BLOCK_BYTES, operation, 30.0)
        return replace(grant, length=self._length)

    async def lease(self, chain, first):
        of_all = checksum(self._node.store.segment.memory[: self._length])
        return Leased(1, 1, self._grant(Operation.READ), (of_all,))

    async def reserve(self, chain, tenant):
        return OpenPut(1, (0,), self._grant(Operation.WRITE))

    async def commit(self, ticket, checksums):
        return 1

    async def release(self, ticket=None):
        pass

    abort = close = release


@pytest.mark.parametrize("num_blocks", [0, 0.5, 2])
async def test_a_store_whose_blocks_have_another_length_reaches_nothing_beside_ours(cluster, num_blocks):
    one = await cluster.node("one")
    await save(one.cache, "ab")
    access = GenerousAccess(one, int(num_blocks * BLOCK_BYTES))
    cache, clock = await cluster.client(reach=lambda address: access, block_bytes=BLOCK_BYTES)
    ours = private_segment(2 * BLOCK_BYTES)
    ours.memory[:] = b"x" * ours.num_bytes
    assert await cache.load(chain_of("a"), ours, [0], sums=None) == 0
    assert bytes(ours.memory) == b"x" * ours.num_bytes
    clock.advance(31)  # it rests
    before = bytes(one.store.segment.memory)
    assert await cache.save(chain_of("a"), ours, [0], [1]) == 0
    assert bytes(one.store.segment.memory) == before


async def test_a_long_chain_is_saved_by_several_puts(cluster, monkeypatch):
    """The end of a put names all its blocks in one turn of the event loop."""
    for module in "client", "service":
        monkeypatch.setattr(f"kvstore.{module}.MAX_PUT_BLOCKS", 4)
    one = await cluster.node("one")
    cache, _ = await cluster.client()
    reached = RemoteAccess(one.member.address)
    try:
        reserved = await reached.reserve(chain_of("abcdefghijk"), "")
        assert reserved.missing == (0, 1, 2, 3)
        await reached.abort(reserved.ticket)
    finally:
        await reached.close()
    assert await save(cache, "abcdefghijk") == 11
    assert await load(cache, "abcdefghijk") == 11
    assert await save(cache, "abcdefghijklmn", first=2) == 3
    all_checked(one)


@pytest.mark.parametrize("failing", ["reserve", "commit"])
async def test_of_a_long_chain_nothing_is_put_after_what_failed(cluster, monkeypatch, failing):
    """The rest has no head there: room would be made for it, and who does not answer be waited for again."""
    for module in "client", "service":
        monkeypatch.setattr(f"kvstore.{module}.MAX_PUT_BLOCKS", 4)
    one = await cluster.node("one")
    cache, _ = await cluster.client()
    begun = []

    def noted(name):
        whole = getattr(RemoteAccess, name)

        async def call(self, *arguments):
            begun.append(name)
            if (name, begun.count(name)) == (failing, 2):
                raise UnavailableError("no answer")
            return await whole(self, *arguments)

        return call

    for name in "reserve", "commit":
        monkeypatch.setattr(RemoteAccess, name, noted(name))
    assert await save(cache, "abcdefghijklmn") == 4
    assert begun == ["reserve", "commit", "reserve", "commit"][: 3 + (failing == "commit")]
    all_checked(one)


async def test_a_member_that_claims_more_blocks_than_were_asked_for_is_left_out(cluster, monkeypatch):
    """Each would be listed, and there may be four thousand million of them."""
    match = StoreService.Match

    async def boasting(self, request, context):
        answer = await match(self, request, context)
        if answer.member.node_id == "two":
            answer.num_blocks = 1_000
        return answer

    monkeypatch.setattr(StoreService, "Match", boasting)
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, "abc")
    directory = PeerDirectory([one.member.address, two.member.address], SystemClock())
    try:
        found = await directory.lookup(chain_of("abcd"))
        assert [[member.node_id for member in replicas] for replicas in found] == [["one"]] * 3
    finally:
        await directory.close()


async def test_a_tail_without_its_head_is_not_saved(cluster):
    one = await cluster.node("one")
    assert await save(one.cache, "abc", first=1) == 0
    assert await save(one.cache, "a") == 1
    assert await save(one.cache, "abc", first=1) == 2
    all_checked(one)


async def test_a_chain_is_put_together_from_what_several_hold(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, "ab")
    await save(two.cache, "abcd")
    cache, _ = await cluster.client()
    assert await load(cache, "abcde") == 4
    await two.die()
    assert await load(cache, "abcde") == 2
    all_checked(one)


async def test_a_holder_that_died_is_left_for_the_next(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, "abc")
    await save(two.cache, "abc")
    cache, _ = await cluster.client()
    await one.die()
    assert await load(cache, "abc") == 3
    all_checked(two)


async def test_when_nobody_is_left_nothing_is_loaded_and_nothing_raised(cluster):
    one = await cluster.node("one")
    await save(one.cache, "abc")
    cache, _ = await cluster.client()
    await one.die()
    assert await load(cache, "abc") == 0
    assert await save(cache, "xyz") == 0


async def test_a_holder_that_forgot_is_no_failure(cluster):
    one, two = await cluster.node("one", num_blocks=3), await cluster.node("two")
    await save(one.cache, "abc")
    cluster.board.holders[chain_of("abcd")[3]] = {one.member.epoch: None}
    assert await load(two.cache, "abcd") == 3


async def test_damaged_bytes_are_never_returned_and_their_holder_forgets_them(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, "abcd")
    chain = chain_of("abcd")
    offset = one.store.pool.record(chain[2]).block_id * BLOCK_BYTES
    one.store.segment.memory[offset + 77] ^= 1
    assert await load(two.cache, "abcd") == 2
    assert (two.cache.num_damaged, one.store.num_damaged) == (1, 1)
    assert await two.cache.match(chain) == 2
    assert await save(one.cache, "abcd") == 2
    assert await load(two.cache, "abcd") == 4
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
    await save(one.cache, "abc")
    access = RemoteAccess(one.member.address)
    leased = await access.lease(chain_of("abc"), 0)
    assert leased.num_blocks == 3
    await access.close()
    assert one.store.pool.accounts().held == 3
    one.clock.advance(31)
    await one.store.tick()
    all_checked(one)
    assert one.agent.num_grants == 0


async def nothing_is_held_once_messages_ran_out(node):
    """A call that was cancelled on its way may be carried out later: its lease ends that."""
    await node.server.stop(20)
    async with asyncio.timeout(60):
        while (books := node.store.pool.accounts()).held or books.in_transfer:
            node.clock.advance(31)
            await node.store.tick()
            await asyncio.sleep(0)
    node.store.check()
    assert node.agent.num_grants == 0


class WaitingTransport(FaultyTransport):
    """Waits within each copy, where tcp does not if the answer comes while it looks for it."""

    async def move(self, peer, grant, pieces, priority):
        await asyncio.sleep(0)
        await super().move(peer, grant, pieces, priority)


@pytest.mark.parametrize("answered", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("work", [load, save], ids=["load", "save"])
async def test_a_load_or_save_cancelled_at_any_wait_holds_nothing(cluster, work, answered):
    waits = 0
    while True:
        one = await cluster.node(f"one-{waits}")
        cache, _ = await cluster.client(wrap=lambda inner: WaitingTransport(inner, lambda: None))
        if work is load:
            await save(one.cache, "abcdef")
        if not await CancelledAt(work(cache, "abcdef"), waits, answered).run():
            break
        await nothing_is_held_once_messages_ran_out(one)
        await one.cache.directory.leave()
        waits += 1
    assert waits >= 3
    assert await load(one.cache, "abcdef") == 6


async def test_a_leased_chain_outlives_pressure(cluster):
    one = await cluster.node("one", num_blocks=4)
    cache, _ = await cluster.client()
    await save(cache, "ab")
    leased = await one.store.lease(chain_of("ab"), 0)
    assert leased.num_blocks == 2
    await save(cache, "wxyz")
    assert await load(cache, "ab") == 2
    await one.store.release(leased.ticket)
    await save(cache, "pqrst")
    assert await load(cache, "ab") == 0
    all_checked(one)


async def test_deleting_reaches_every_replica(cluster):
    one, two = await cluster.node("one"), await cluster.node("two")
    await save(one.cache, "ab")
    await save(two.cache, "ab")
    cache, _ = await cluster.client()
    assert await cache.delete(chain_of("ab")) == 4
    assert await cache.match(chain_of("ab")) == 0


async def test_a_member_that_does_not_answer_is_named_unavailable():
    access = RemoteAccess("127.0.0.1:1")
    with pytest.raises(UnavailableError):
        await access.match(chain_of("a"))
    await access.close()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_network_does_no_wrong_byte_is_loaded_and_nothing_raised(cluster, seed):
    rng = random.Random(seed)
    silent = [Fault.FLIP, Fault.TRUNCATE, Fault.DROP, Fault.MISPLACE, Fault.FAIL, Fault.DUPLICATE]

    def choose():
        return rng.choice(silent) if rng.random() < 0.5 else None

    one, two = await cluster.node("one", num_blocks=64), await cluster.node("two", num_blocks=64)
    cache, clock = await cluster.client(wrap=lambda inner: FaultyTransport(inner, choose))
    loaded = 0
    for number in range(12):
        path = f"{number}bcdef"
        await save(cache, path)
        loaded += await load(cache, path)
        loaded += await load(one.cache, path)
        clock.advance(60)
        one.clock.advance(60)
    assert loaded > 20
    for node in (one, two):
        await node.store.tick()
        node.store.check()


async def test_bytes_damaged_on_their_way_are_asked_for_again(cluster):
    plan = [Fault.FLIP]
    one = await cluster.node("one")
    await save(one.cache, "abc")
    cache, _ = await cluster.client(
        wrap=lambda inner: FaultyTransport(inner, lambda: plan.pop() if plan else None)
    )
    assert await load(cache, "abc") == 3
    assert (cache.num_damaged, one.store.num_damaged) == (1, 0)


# --- with a disk below -------------------------------------------------------------------


async def test_what_memory_has_no_room_for_is_read_back_from_disk(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.25)
    cache, _ = await cluster.client()
    for path in ("abcd", "efgh", "ijkl"):
        assert await save(cache, path) == 4
        await one.store.tick()
    found = one.store.match(chain_of("abcd"))
    assert (found.num_blocks, found.num_in_memory) == (4, 0)
    assert await load(cache, "abcd") == 4
    assert await load(cache, "efgh") == 4
    all_checked(one)


async def test_a_damaged_record_on_disk_is_a_miss_from_there_on(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.05)
    cache, _ = await cluster.client()
    await save(cache, "abcdef")
    await one.store.tick()
    file = tmp_path / "blocks.slots"
    data = bytearray(file.read_bytes())
    at = data.index(bytes_of(chain_of("abcdef")[3])[:64])
    data[at + 100] ^= 1
    file.write_bytes(data)
    assert await load(cache, "abcdef") == 3
    all_checked(one)


async def test_two_readers_of_one_chain_read_it_from_disk_once(cluster, tmp_path):
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.5, low_watermark=0.05)
    cache, _ = await cluster.client()
    await save(cache, "abcdef")
    await one.store.tick()
    assert await asyncio.gather(*(load(cache, "abcdef") for _ in range(3))) == [6, 6, 6]
    all_checked(one)


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_over_both_tiers_load_right_bytes_and_lose_no_block(cluster, tmp_path, seed):
    rng = random.Random(seed)
    one = await cluster.node("one", num_blocks=8, folder=tmp_path, high_watermark=0.6, low_watermark=0.3)
    cache, _ = await cluster.client()
    loaded, tickets = 0, []
    for _ in range(60):
        path = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        act = rng.random()
        if act < 0.4:
            await save(cache, path)
        elif act < 0.7:
            loaded += await load(cache, path)
        elif act < 0.8:
            tickets.append((await one.store.lease(chain_of(path), 0)).ticket)
        elif act < 0.9 and tickets:
            await one.store.release(tickets.pop())
        elif act < 0.93:
            await cache.delete(chain_of(path))
        await one.store.tick()
        one.store.check()
    assert loaded > 10
