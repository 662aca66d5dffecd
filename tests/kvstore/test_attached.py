"""A storage process in a cluster: the conductor knows its blocks, and others may read what it lends."""

import asyncio

import pytest

from base.messages import Failed, Lend, Lent, Release
from kvstore.attached import AttachedStore, storage_info
from kvstore.context import private_segment
from tests.kvstore.cluster import BLOCK_BYTES, bytes_of, chain_of, running_cluster, save
from tests.manual_clock import ManualClock
from transfer.batch import pieces_of


class Attached:
    """An attached store and what it sent."""

    def __init__(self, node, group):
        self.node = node
        self.sent = asyncio.Queue()
        self.work = AttachedStore(node.store, group, self.sent.put_nowait)
        self.known = set()

    def lend(self, path, first=0, name="r"):
        self.work.receive([Lend(name, tuple(chain_of(path)), 10.0, first)])

    async def said(self):
        async with asyncio.timeout(60):
            return await self.sent.get()

    def listen(self):
        """Do as a conductor with the events that have come."""
        told = self.work.kv_events()
        if told is not None:
            self.known -= set(told.removed)
            self.known |= set(told.stored)
        return self.known


@pytest.fixture
async def pair():
    async with running_cluster() as cluster, asyncio.TaskGroup() as group:
        attached = Attached(await cluster.node("one", num_blocks=6), group)
        yield cluster, attached
        attached.work.lost()


async def test_the_conductor_is_told_what_came_and_what_went(pair):
    _, attached = pair
    assert attached.work.kv_snapshot().stored == ()
    await save(attached.node.cache, "abc")
    assert attached.listen() == set(chain_of("abc"))
    await save(attached.node.cache, "uvwxyz")
    assert attached.listen() == set(attached.node.store.hashes)
    snapshot = attached.work.kv_snapshot()
    assert (snapshot.is_snapshot, set(snapshot.stored)) == (True, attached.known)
    assert attached.work.kv_events() is None


async def test_nothing_is_kept_for_a_conductor_that_is_away(pair):
    """It may be away for ever, while others have blocks come and go."""
    _, attached = pair
    await save(attached.node.cache, "abc")
    assert attached.work.kv_events() is None
    assert set(attached.work.kv_snapshot().stored) == set(chain_of("abc"))
    await save(attached.node.cache, "xyz")
    attached.work.lost()
    await save(attached.node.cache, "uvw")
    assert attached.work.kv_events() is None
    assert set(attached.work.kv_snapshot().stored) == set(attached.node.store.hashes)


async def test_what_it_lends_is_read_by_another_until_the_release(pair):
    cluster, attached = pair
    await save(attached.node.cache, "abcd")
    attached.lend("abcd", first=1)
    lent = await attached.said()
    assert isinstance(lent, Lent)
    reader = await cluster.agent("reader", ManualClock())
    into = private_segment(3 * BLOCK_BYTES)
    batch = pieces_of(into, range(0, into.num_bytes, BLOCK_BYTES), lent.grant.offsets, BLOCK_BYTES)
    await reader.read(attached.node.member.peer, lent.grant, batch)
    assert bytes(into.memory) == b"".join(bytes_of(name) for name in chain_of("abcd")[1:])
    assert attached.work.heartbeat().num_held_blocks == 4
    attached.work.receive([Release("r")])
    async with asyncio.timeout(60):
        while attached.node.store.pool.accounts().held:
            await asyncio.sleep(0)
    assert attached.node.agent.num_grants == 0


async def test_blocks_that_are_gone_are_not_lent(pair):
    _, attached = pair
    attached.lend("abc")
    refused = await attached.said()
    assert isinstance(refused, Failed)
    assert refused.reason == "LostError"


async def test_it_has_no_role_and_blocks_of_any_model(pair):
    _, attached = pair
    info = storage_info("s", attached.node.member.peer, 6)
    assert (info.roles, info.model_id, info.layout_id) == (frozenset(), "", "")
