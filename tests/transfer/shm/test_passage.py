"""Small batches that follow each other over shared memory: which checks of the first the next still pass."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from base.clock import ManualClock, SystemClock
from base.config import TransferConfig
from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Operation
from tests.transfer.remote_peer import RemotePeer
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.shm import passage as shm_passage
from transfer.shm.passage import OPEN_S

BLOCK = 4096
CONFIG = TransferConfig(transports=("shm",))


class Pair:
    def __init__(self, us, owner):
        self.us, self.owner = us, owner
        self.ours, self.theirs = us.allocate(8 * BLOCK), owner.allocate(8 * BLOCK)
        self.ours.memory[:] = bytes(range(256)) * (8 * BLOCK // 256)

    def grant(self, operation=Operation.WRITE, offsets=(0, BLOCK)):
        return self.owner.grant(self.theirs, offsets, BLOCK, operation, 30.0)

    def batch(self, source, target, length=BLOCK, segment=None):
        return batch_of(segment or self.ours, [source], [target], length)

    async def write(self, grant, *batch):
        await self.us.write(self.owner.descriptor, grant, self.batch(*batch))


@asynccontextmanager
async def pair():
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock()) as us,
        TransferAgent("owner", 2, CONFIG, SystemClock()) as owner,
    ):
        made = Pair(us, owner)
        # one descriptor, as requests that follow each other have it
        made.peer = owner.descriptor
        yield made


@pytest.fixture
def still(monkeypatch):
    """A passage's clock, which stands: what is open stays so until it is told."""
    clock = ManualClock()
    monkeypatch.setattr(shm_passage, "_now_s", clock.now_s)
    return clock


def opened(us):
    return [passage for passage, _, _ in us._passages.values()]


async def test_batches_that_follow_each_other_go_through_one_passage_and_are_all_counted(still):
    async with pair() as at:
        grant = at.grant(offsets=tuple(range(0, 8 * BLOCK, BLOCK)))
        await at.us.write(at.peer, grant, at.batch(0, BLOCK))
        [first] = opened(at.us)
        for number in range(2, 8):
            await at.us.write(at.peer, grant, at.batch(0, number * BLOCK))
        assert opened(at.us) == [first]
        assert at.theirs.memory[BLOCK:] == bytes(at.ours.memory[:BLOCK]) * 7
        [totals] = at.us.totals()
        assert (totals.batches, totals.num_bytes) == (7, 7 * BLOCK)


async def test_with_the_turn_of_the_loop_the_hold_and_the_passage_end(still):
    async with pair() as at:
        grant = at.grant()
        await at.us.write(at.peer, grant, at.batch(0, 0))
        [passage] = opened(at.us)
        assert passage.carried(at.batch(0, 0))
        await asyncio.sleep(0)
        assert not opened(at.us)
        assert not passage.carried(at.batch(0, 0))
        # nobody holds it: a revocation has nothing to wait for
        async with asyncio.timeout(60):
            await at.owner.revoke(grant)


async def test_a_grant_that_ends_between_two_batches_of_a_turn_is_refused(still):
    async with pair() as at:
        grant = at.grant()
        await at.us.write(at.peer, grant, at.batch(0, 0))
        revoking = asyncio.ensure_future(at.owner.revoke(grant))
        # its first step refuses the grant, and the hold is still kept by us
        at.owner._holdings.revoke(grant.generation)
        before = bytes(at.theirs.memory)
        with pytest.raises(StaleError):
            await at.us.write(at.peer, grant, at.batch(2 * BLOCK, 0))
        assert at.theirs.memory == before
        await revoking


async def test_a_passage_that_was_open_for_its_time_is_opened_anew(still):
    async with pair() as at:
        grant = at.grant()
        await at.us.write(at.peer, grant, at.batch(0, 0))
        [first] = opened(at.us)
        still.advance(2 * OPEN_S)
        await at.us.write(at.peer, grant, at.batch(0, 0))
        [second] = opened(at.us)
        assert second is not first


async def test_what_the_grant_does_not_allow_is_refused_as_by_the_first_batch(still):
    async with pair() as at:
        grant = at.grant()
        await at.us.write(at.peer, grant, at.batch(0, 0))
        before = bytes(at.theirs.memory)
        wider = replace(grant, offsets=tuple(range(0, 8 * BLOCK, BLOCK)))
        narrower = replace(grant, offsets=(0,))
        for bad, batch in [
            (grant, at.batch(0, 2 * BLOCK)),
            (grant, at.batch(0, BLOCK, BLOCK + 1)),
            (grant, at.batch(8 * BLOCK, 0)),
            (grant, at.batch(-16, 0)),
            (wider, at.batch(0, 2 * BLOCK)),
            (narrower, at.batch(0, BLOCK)),
        ]:
            with pytest.raises(ProtocolError):
                await at.us.write(at.peer, bad, batch)
            assert at.theirs.memory == before
        with pytest.raises(ProtocolError):
            await at.us.read(at.peer, grant, at.batch(0, 0))
        assert at.ours.memory[:256] == bytes(range(256))


async def test_another_epoch_of_the_peer_is_not_written_to_through_the_passage(still):
    async with pair() as at:
        grant = at.grant()
        await at.us.write(at.peer, grant, at.batch(0, 0))
        before = bytes(at.theirs.memory)
        with pytest.raises((StaleError, TransferFailedError)):
            await at.us.write(replace(at.peer, epoch=3), grant, at.batch(BLOCK // 2, 0))
        assert at.theirs.memory == before


async def test_another_segment_of_ours_is_found_its_own_way(still):
    async with pair() as at:
        grant, other = at.grant(), at.us.allocate(BLOCK)
        other.memory[:] = b"\7" * BLOCK
        await at.us.write(at.peer, grant, at.batch(0, 0))
        await at.us.write(at.peer, grant, at.batch(0, BLOCK, segment=other))
        assert at.theirs.memory[BLOCK : 2 * BLOCK] == other.memory
        assert at.theirs.memory[:BLOCK] == at.ours.memory[:BLOCK]


async def test_reads_go_through_as_well(still):
    async with pair() as at:
        at.theirs.memory[:] = b"\5" * 8 * BLOCK
        grant = at.grant(Operation.READ)
        for target in (0, 3 * BLOCK):
            await at.us.read(at.peer, grant, at.batch(BLOCK, target))
        assert at.ours.memory[:BLOCK] == at.ours.memory[3 * BLOCK : 4 * BLOCK] == b"\5" * BLOCK
        assert at.ours.memory[BLOCK : BLOCK + 256] == bytes(range(256))


async def test_an_owner_that_ended_is_noticed_by_the_next_passage(still):
    async with TransferAgent("us", 1, CONFIG, SystemClock()) as us:
        ours = us.allocate(BLOCK)
        with RemotePeer(("shm",)) as peer:
            grant, to = peer.grant(peer.allocate(BLOCK), (0,), BLOCK), peer.descriptor
            await us.write(to, grant, batch_of(ours, [0], [0], BLOCK))
            peer.kill()
            still.advance(2 * OPEN_S)
            with pytest.raises(TransferFailedError):
                await us.write(to, grant, batch_of(ours, [0], [0], BLOCK))
