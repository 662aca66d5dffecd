"""A pool that is pinned before a node serves."""

from base.errors import StaleError, TransferFailedError
from node.store import PIN_TRIES, pin_pool
from tests.kvstore.cluster import running_cluster

LATE = TransferFailedError("no end within 20 s")
REVOKED = StaleError("grant 0x1 is being revoked")


class Pinning:
    """As much of an agent as pinning uses: its writes fail so, one after another, and then succeed."""

    descriptor = None

    def __init__(self, *failures):
        self._failures = list(failures)
        self.grants = []

    async def write(self, peer, grant, pieces):
        self.grants.append(grant.generation)
        if self._failures:
            raise self._failures.pop(0)


async def pinned(tmp_path, agent):
    """Return whether all blocks are free once a pool is pinned."""
    async with running_cluster() as cluster:
        store = (await cluster.node("one", num_blocks=8, folder=tmp_path)).store
        await pin_pool(store, agent, store.segment)
        return store.pool.accounts().free == 8


async def test_each_try_has_a_grant_of_its_own_and_leaves_nothing_held(tmp_path):
    agent = Pinning(LATE, REVOKED)
    assert await pinned(tmp_path, agent)
    assert len(set(agent.grants)) == 3


async def test_a_pool_that_cannot_be_pinned_is_served_all_the_same(tmp_path):
    agent = Pinning(*[LATE] * 100)
    assert await pinned(tmp_path, agent)
    assert len(agent.grants) == PIN_TRIES
