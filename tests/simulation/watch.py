"""Watches of the shipped owners of memory: who had a block when, so that a late byte is seen.

`check()` of a pool finds a block in two places. It does not find a byte that arrives in a block
which has been given back and taken again since; for that each taking of a block has a number
here, and whoever may write or read keeps the numbers of what it was given.
"""

from __future__ import annotations

from engine.block_pool import BlockPool
from kvstore.pool import HostPool
from transfer.agent import TransferAgent


class WatchedPool(BlockPool):
    """A block pool that numbers each taking of a block. Changes set `is_changed`."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.is_changed = True
        self._takings = [0] * num_blocks
        self._holds = [0] * num_blocks

    def allocate(self, count):
        block_ids = super().allocate(count)
        self.is_changed = True
        for block_id in block_ids:
            assert not self._holds[block_id], f"block {block_id} was given while it was held"
            self._takings[block_id] += 1
            self._holds[block_id] = 1
        return block_ids

    def hold(self, block_ids):
        block_ids = list(block_ids)
        super().hold(block_ids)
        self.is_changed = True
        for block_id in block_ids:
            self._holds[block_id] += 1

    def release(self, block_ids, evict_first=False):
        block_ids = list(block_ids)
        super().release(block_ids, evict_first)
        self.is_changed = True
        for block_id in block_ids:
            self._holds[block_id] -= 1

    def require_held(self, block_ids):
        for block_id in block_ids:
            assert self._holds[block_id], f"a step uses block {block_id}, which nobody holds"

    def takings(self, block_ids):
        return [(block_id, self._takings[block_id]) for block_id in block_ids]

    def require_same(self, takings, what):
        """Raise AssertionError if one of these blocks is held no longer, or anew."""
        for block_id, taking in takings:
            assert self._holds[block_id], f"{what}: block {block_id} is not held"
            assert self._takings[block_id] == taking, f"{what}: block {block_id} has another owner"


class WatchedHostPool(HostPool):
    """A host pool that knows which put each block is set aside for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._put_of = {}

    def reserve(self, chain, tenant, lease_s):
        put = super().reserve(chain, tenant, lease_s)
        self._put_of.update(dict.fromkeys(put.block_ids, put.put_id))
        return put

    def commit(self, put_id, checksums):
        stored = super().commit(put_id, checksums)
        self._end(put_id)
        return stored

    def abort(self, put_id):
        super().abort(put_id)
        self._end(put_id)

    def takings(self, block_ids):
        return [(block_id, self._put_of.get(block_id)) for block_id in block_ids]

    def require_same(self, takings, what):
        for block_id, put_id in takings:
            assert self._put_of.get(block_id) == put_id, f"{what}: block {block_id} is set aside no more"

    def _end(self, put_id):
        for block_id in [each for each, owner in self._put_of.items() if owner == put_id]:
            del self._put_of[block_id]


class WatchedAgent(TransferAgent):
    """An agent whose grants remember whose blocks they were given on."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._pools = {}
        self._takings = {}

    def watch(self, segment, pool, block_bytes):
        self._pools[segment.segment_id] = (pool, block_bytes)

    def grant(self, segment, offsets, length, operation, lease_s):
        grant = super().grant(segment, offsets, length, operation, lease_s)
        self._takings[grant.generation] = self.takings(segment.segment_id, offsets)
        return grant

    def takings(self, segment_id, offsets):
        pool, block_bytes = self._pools[segment_id]
        return pool.takings([int(offset) // block_bytes for offset in offsets])

    def require_own(self, segment_id, takings, what):
        self._pools[segment_id][0].require_same(takings, what)

    def require_granted(self, grant, what):
        """Raise AssertionError if bytes may not be touched under this grant, whatever it says itself."""
        self.require_own(grant.segment_id, self._takings[grant.generation], what)
