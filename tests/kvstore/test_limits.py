"""The time that a call to a store may take: a limit for each of them, and none in a test's cluster."""

from unittest.mock import patch

import pytest

from base.errors import LeaseExpiredError
from kvstore import access
from kvstore.access import RemoteAccess
from kvstore.context import private_segment
from kvstore.service import StoreService
from kvstore.store import LEASE_S
from protos import kvstore_pb2 as pb
from tests.kvstore.cluster import chain_of, running_cluster, save
from tests.manual_clock import ManualClock
from transfer.batch import pieces_of

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KvStore"].methods]


@pytest.fixture
def time_left(monkeypatch):
    """The seconds that were left to the last call of each method when it came; None: there is no limit."""
    left = {}

    def noting(method):
        handler = getattr(StoreService, method)

        def noted(self, request, context):
            left[method] = context.time_remaining()
            return handler(self, request, context)

        return noted

    for method in METHODS:
        monkeypatch.setattr(StoreService, method, noting(method))
    return left


async def call_each(node):
    """Call each method of a node's store once."""
    reached, chain = RemoteAccess(node.member.address), chain_of("abc")
    assert await save(node.cache, "abc") == 3
    assert (await reached.match(chain)).num_blocks == 3
    reserved = await reached.reserve(chain_of("x"), "")
    assert await reached.commit(reserved.ticket, [0]) == 1
    await reached.abort((await reached.reserve(chain_of("y"), "")).ticket)
    await reached.release((await reached.lease(chain, 0)).ticket)
    await reached.report(chain[0])
    assert await reached.delete(chain) == 3
    await reached.close()


async def test_each_call_has_a_limit(time_left):
    async with running_cluster() as cluster:
        node = await cluster.node("one")
        with patch.object(access, "CALL_TIMEOUT_S", 1e4), patch.object(access, "LEASE_TIMEOUT_S", 1e5):
            await call_each(node)
    assert set(time_left) == set(METHODS)
    assert None not in time_left.values()
    assert {method for method, left_s in time_left.items() if left_s > 2e4} == {"Lease"}


async def test_in_a_cluster_of_tests_no_call_runs_out(time_left):
    """A process may stand still for longer than the limit: what it asked for would be lost by chance."""
    async with running_cluster() as cluster:
        await call_each(await cluster.node("one"))
    assert time_left == dict.fromkeys(METHODS)
    assert None not in (access.CALL_TIMEOUT_S, access.LEASE_TIMEOUT_S)


async def test_in_a_cluster_of_tests_a_grant_ends_by_the_clock_of_its_node():
    async with running_cluster() as cluster:
        one = await cluster.node("one")
        assert await save(one.cache, "abc") == 3
        reader = await cluster.agent("reader", ManualClock())
        grant = (await one.store.lease(chain_of("abc"), 0)).grant
        pieces = pieces_of(private_segment(grant.length), [0], grant.offsets[:1], grant.length)
        one.clock.advance(LEASE_S - 1.0)
        await reader.read(one.member.peer, grant, pieces)
        one.clock.advance(1.0)
        with pytest.raises(LeaseExpiredError):
            await reader.read(one.member.peer, grant, pieces)
