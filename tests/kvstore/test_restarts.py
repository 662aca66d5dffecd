"""What is kept of members that were started again and again, each time at another address."""

import weakref

from base.errors import UnavailableError
from base.grants import PeerDescriptor
from base.request import NodeId
from kvstore.wire import Member
from tests.kvstore.cluster import BLOCK_BYTES, chain_of, load, running_cluster, save


class GoneStore:
    """The way to a member that answers nothing."""

    async def lease(self, chain, first):
        raise UnavailableError("nobody listens")

    async def close(self):
        pass


async def test_a_client_has_no_connection_to_members_that_are_gone():
    made = weakref.WeakSet()

    def reach(address):
        access = GoneStore()
        made.add(access)
        return access

    async with running_cluster() as cluster:
        cache, clock = await cluster.client(reach=reach)
        for number in range(1, 201):
            peer = PeerDescriptor("one", number, ())
            member = Member(NodeId("one"), number, f"10.0.0.1:{number}", "one", peer, BLOCK_BYTES)
            cluster.board.members = {number: member}
            cluster.board.holders = {name: {number: None} for name in chain_of("ab")}
            assert await load(cache, "ab") == 0
            clock.advance(60.0)
        assert len(made) == 1


async def test_a_connection_to_a_member_that_lives_is_kept():
    async with running_cluster() as cluster:
        one, two = await cluster.node("one"), await cluster.node("two")
        cache, _ = await cluster.client()
        assert await save(one.cache, "abc") == 3
        assert await save(two.cache, "xyz") == 3
        for _ in range(2):
            assert (await load(cache, "abc"), await load(cache, "xyz")) == (3, 3)
        await one.die()
        cluster.board.members.pop(one.member.epoch)
        three = await cluster.node("three")
        assert await save(three.cache, "mno") == 3
        assert (await load(cache, "mno"), await load(cache, "xyz"), await load(cache, "abc")) == (3, 3, 0)
