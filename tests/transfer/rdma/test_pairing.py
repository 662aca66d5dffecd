"""Work on the rails of one peer, with rails that are made up: who goes first, and what a lost one leaves."""

import asyncio
import gc
import select
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import numpy as np
import pytest

from base.errors import TransferFailedError
from base.grants import Endpoint, Operation, PeerDescriptor
from tests.manual_clock import ManualClock
from tests.transfer.rdma.made_up_rails import NOWHERE, FakeRail
from transfer.batch import Pieces, Priority
from transfer.owned import segment as segments
from transfer.owned.holdings import Holdings
from transfer.rdma import pairing as rdma_pairing
from transfer.rdma.holds import pack_admission
from transfer.rdma.pairing import MAX_FAILURES, REST_S, WORK_BYTES, Pairing, WorkBatch, resting_rails
from transfer.rdma.registrations import Reach, Registrations
from transfer.rdma.topology import UNREACHED
from transfer.rdma.transport import RdmaTransport
from transfer.rdma.verbs import MAX_OUTSTANDING, Ended
from transfer.tcp.greeting import PeerKey
from transfer.tcp.reactor import Reactor
from transfer.tcp.server import TcpServer

EPOCH = 7
SEGMENT = segments.over(1, bytearray(16))
ADMITTED = pack_admission(60.0, Reach(0, tuple(range(8)), (4,) * 8))


class Bed:
    """A peer that agrees to any queue pairs, and pairings with it."""

    def __init__(self, reactor: Reactor) -> None:
        self.clock = ManualClock()
        self.resting_rails = resting_rails(self.clock)
        self.rails = [FakeRail("a"), FakeRail("b")]
        self.pairings: list[Pairing] = []
        agrees = SimpleNamespace(
            pair=lambda link, offer: offer, cut=lambda link: None, admit=lambda generation, digest: ADMITTED
        )
        self.holdings = Holdings(self.clock, None)
        self.server = TcpServer("127.0.0.1", 0, PeerKey(b"", EPOCH), self.holdings, [reactor], agrees)

    async def paired(self, num_rails: int = 2) -> Pairing:
        rails = self.rails[:num_rails]
        pairing = Pairing(self.server.address, PeerKey(b"", EPOCH), rails, self.resting_rails, {}, self.clock)
        self.pairings.append(pairing)
        await pairing.ready()
        return pairing


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    reactor = Reactor("test")
    started = Bed(reactor)
    yield started
    for pairing in started.pairings:
        pairing.close()
    started.server.close()
    await asyncio.to_thread(reactor.stop)
    started.holdings.close()
    for rail in started.rails:
        rail.close()


def submit(
    pairing: Pairing,
    name: int,
    num_works: int,
    priority: Priority = Priority.FOREGROUND,
    distances: tuple[int, int] = (4, 4),
) -> WorkBatch:
    batch = WorkBatch(
        True, Reach(0, (0, 0), distances[: len(pairing._lanes)]), Reach(0, (name, name), (4, 4))
    )
    places = np.arange(num_works, dtype=np.int64) * WORK_BYTES
    pieces = Pieces(SEGMENT, np.stack((places, np.full(num_works, WORK_BYTES), places)))
    pairing.add(batch, pieces, priority)
    return batch


def end_first(pairing: Pairing, lane: int, count: int, error: str = "") -> None:
    owner = pairing._lanes[lane]
    work_id = owner.under_way[count - 1][0]
    pairing.on_ended(owner, Ended(owner.pair.end.number, work_id, error, is_refused=False))
    pairing.pump()


async def test_what_a_request_waits_for_is_posted_before_background_work_that_waits(bed: Bed) -> None:
    pairing = await bed.paired(num_rails=1)
    [pair] = bed.rails[0].pairs
    submit(pairing, 1, MAX_OUTSTANDING + 40, Priority.BACKGROUND)
    submit(pairing, 2, 4)
    assert {name for _, name in pair.posted} == {1}
    end_first(pairing, 0, 8)
    assert [name for _, name in pair.posted[MAX_OUTSTANDING:]] == [2] * 4 + [1] * 4


async def test_a_batch_is_spread_over_the_rails_and_ends_when_all_of_it_has(bed: Bed) -> None:
    pairing = await bed.paired()
    batch = submit(pairing, 1, 64)
    assert [len(rail.pairs[0].posted) for rail in bed.rails] == [32, 32]
    end_first(pairing, 0, 32)
    assert not batch.is_over
    end_first(pairing, 1, 32)
    assert batch.is_over
    await batch.ended(lambda: None)


async def test_a_batch_of_less_than_a_burst_is_spread_over_the_rails_too(bed: Bed) -> None:
    pairing = await bed.paired()
    submit(pairing, 1, 15)
    assert [len(rail.pairs[0].posted) for rail in bed.rails] == [8, 7]


@pytest.mark.parametrize("how", ["completion", "posting"])
async def test_the_work_of_a_rail_that_fails_goes_to_the_other_after_it_was_destroyed(
    bed: Bed, how: str
) -> None:
    pairing = await bed.paired()
    lost, kept = (rail.pairs[0] for rail in bed.rails)
    if how == "posting":
        lost.is_broken = True
        batch = submit(pairing, 1, 20)
    else:
        batch = submit(pairing, 1, 20)
        end_first(pairing, 0, 3, "status 12")
    assert lost.is_closed
    # Of the lost rail's work, what ended before the error is not done again.
    assert len(kept.posted) == (20 if how == "posting" else 18)
    end_first(pairing, 1, len(kept.posted))
    await batch.ended(lambda: None)


async def test_when_the_last_rail_fails_the_batch_does_and_says_which(bed: Bed) -> None:
    pairing = await bed.paired()
    batch = submit(pairing, 1, 20)
    end_first(pairing, 0, 1, "status 12")
    end_first(pairing, 1, 1, "status 12")
    with pytest.raises(TransferFailedError, match="b failed: status 12"):
        await batch.ended(lambda: None)
    with pytest.raises(TransferFailedError, match="no rail"):
        await pairing.ready()


async def test_a_rail_that_failed_again_and_again_rests_and_is_taken_again_afterwards(bed: Bed) -> None:
    bed.rails[0].is_down = True
    for _ in range(MAX_FAILURES):
        pairing = await bed.paired()
        submit(pairing, 1, 4)
        assert [len(rail.pairs[-1].posted) for rail in bed.rails] == [0, 4]
    bed.rails[0].is_down = False
    pairing = await bed.paired()
    assert [lane.is_open for lane in pairing._lanes] == [False, True]
    bed.clock.advance(REST_S)
    assert [lane.is_open for lane in (await bed.paired())._lanes] == [True, True]


async def test_a_pairing_made_while_a_rail_rests_is_replaced_when_it_has_rested(bed: Bed) -> None:
    """Where it is the only rail, the peer would not be reached until the connection ends."""
    for _ in range(MAX_FAILURES):
        bed.resting_rails.failed("a")
    pairing = await bed.paired()
    assert not pairing.is_spent()
    bed.clock.advance(REST_S)
    assert pairing.is_spent()


async def test_others_work_on_a_rail_that_is_stuck_in_a_cancelled_batch_goes_on_by_another(
    bed: Bed, monkeypatch
) -> None:
    monkeypatch.setattr(rdma_pairing, "STUCK_AFTER_S", 0.01)
    pairing = await bed.paired()
    stuck, other = (submit(pairing, name, 1, distances=(3, 4)) for name in (1, 2))
    pairing.drop(stuck)
    with pytest.raises(TransferFailedError, match="cancelled"):
        await asyncio.wait_for(stuck.ended(lambda: None), 60)
    assert [name for _, name in bed.rails[1].pairs[0].posted] == [2]
    end_first(pairing, 1, 1)
    await other.ended(lambda: None)


async def test_the_nearer_rail_carries_a_batch_and_the_other_only_when_that_is_lost(bed: Bed) -> None:
    pairing = await bed.paired()
    near, far = bed.rails[1].pairs[0], bed.rails[0].pairs[0]
    batch = submit(pairing, 1, MAX_OUTSTANDING + 40, distances=(4, 3))
    assert (len(near.posted), len(far.posted)) == (MAX_OUTSTANDING, 0)
    end_first(pairing, 1, 8)
    assert (len(near.posted), len(far.posted)) == (MAX_OUTSTANDING + 8, 0)
    end_first(pairing, 1, 1, "status 12")
    assert (near.is_closed, len(far.posted)) == (True, MAX_OUTSTANDING)
    later = submit(pairing, 2, 1, distances=(4, 3))
    while pairing._lanes[0].under_way:
        end_first(pairing, 0, len(pairing._lanes[0].under_way))
    assert (batch.is_over, later.is_over) == (True, True)
    await batch.ended(lambda: None)


async def test_batches_near_to_different_rails_do_not_wait_for_each_other(bed: Bed) -> None:
    pairing = await bed.paired()
    submit(pairing, 1, MAX_OUTSTANDING + 40, distances=(3, 4))
    submit(pairing, 2, 4, distances=(4, 3))
    assert [{name for _, name in rail.pairs[0].posted} for rail in bed.rails] == [{1}, {2}]


async def test_batches_that_share_a_rail_take_turns_on_it(bed: Bed) -> None:
    pairing = await bed.paired()
    [pair, _] = (rail.pairs[0] for rail in bed.rails)
    submit(pairing, 1, MAX_OUTSTANDING + 64, distances=(3, 4))
    submit(pairing, 2, 64, distances=(4, 4))
    end_first(pairing, 1, 64)
    end_first(pairing, 0, 32)
    assert {name for _, name in pair.posted[MAX_OUTSTANDING:]} == {1}
    submit(pairing, 2, 2 * MAX_OUTSTANDING, distances=(4, 4))
    end_first(pairing, 0, 32)
    assert [name for _, name in pair.posted[-32:]] in ([1] * 16 + [2] * 16, [2] * 16 + [1] * 16)


async def test_a_batch_that_a_request_waits_for_goes_before_background_work_near_to_other_rails(
    bed: Bed,
) -> None:
    pairing = await bed.paired()
    pair = bed.rails[0].pairs[0]
    submit(pairing, 1, MAX_OUTSTANDING + 40, Priority.BACKGROUND, distances=(3, 4))
    submit(pairing, 2, 2 * MAX_OUTSTANDING, distances=(4, 4))
    end_first(pairing, 0, 16)
    assert {name for _, name in pair.posted[MAX_OUTSTANDING:]} == {2}


async def test_what_the_only_open_rail_has_not_registered_fails_at_once(bed: Bed) -> None:
    bed.rails[1].is_down = True
    pairing = await bed.paired()
    batch = submit(pairing, 1, 4, distances=(UNREACHED, 3))
    with pytest.raises(TransferFailedError, match="no rail that is open"):
        await batch.ended(lambda: None)
    assert bed.rails[0].pairs[0].posted == []


async def test_work_fails_with_the_last_rail_that_has_registered_its_memory(bed: Bed) -> None:
    pairing = await bed.paired()
    batch = submit(pairing, 1, 20, distances=(3, UNREACHED))
    end_first(pairing, 0, 1, "status 12")
    with pytest.raises(TransferFailedError, match="a failed: status 12"):
        await batch.ended(lambda: None)
    assert bed.rails[1].pairs[0].posted == []
    assert not submit(pairing, 2, 1).is_over


async def test_a_cancelled_batch_leaves_its_line(bed: Bed) -> None:
    pairing = await bed.paired()
    batch = submit(pairing, 1, MAX_OUTSTANDING + 40, distances=(3, 4))
    pairing.drop(batch)
    end_first(pairing, 0, MAX_OUTSTANDING)
    assert len(bed.rails[0].pairs[0].posted) == MAX_OUTSTANDING
    with pytest.raises(TransferFailedError, match="cancelled"):
        await batch.ended(lambda: None)


async def test_batches_of_one_piece_go_to_the_rail_with_the_least_under_way(bed: Bed) -> None:
    pairing = await bed.paired()
    submit(pairing, 1, 4)
    end_first(pairing, 0, 1)
    for name in range(2, 8):
        submit(pairing, name, 1)
    posted = [[name for _, name in rail.pairs[0].posted] for rail in bed.rails]
    assert posted == [[1, 1, 2, 3, 5, 7], [1, 1, 4, 6]]


async def test_work_that_comes_when_every_rail_is_lost_fails_at_once(bed: Bed) -> None:
    pairing = await bed.paired(num_rails=1)
    submit(pairing, 1, 1)
    end_first(pairing, 0, 1, "status 12")
    for num_works in (1, 2):
        with pytest.raises(TransferFailedError, match="no rail that is open"):
            await submit(pairing, 2, num_works).ended(lambda: None)


class Moving:
    """Batches of one piece through the transport."""

    def __init__(self, bed: Bed) -> None:
        self.transport = RdmaTransport(Registrations(bed.rails, lambda device: NOWHERE), bed.clock)
        self.peer = PeerDescriptor("peer", EPOCH, (Endpoint("rdma", bed.server.address),))
        self.grant = bed.holdings.grant(bed.holdings.allocate(64), [0], 64, Operation.WRITE, 10.0)
        self.rail = bed.rails[0]

    def begin(self) -> asyncio.Future[None]:
        pieces = Pieces(SEGMENT, np.array([[0], [16], [0]]))
        return asyncio.ensure_future(self.transport.move(self.peer, self.grant, pieces, Priority.FOREGROUND))

    async def until_posted(self, count: int) -> None:
        async with asyncio.timeout(60):
            while not (self.rail.pairs and len(self.rail.pairs[0].posted) == count and self.rail.is_armed):
                await asyncio.sleep(0)

    def has_told(self) -> bool:
        return bool(select.select([self.rail.channel_fd], [], [], 0)[0])


@pytest.fixture
async def moving(bed: Bed) -> AsyncIterator[Moving]:
    del bed.rails[1:]
    started = Moving(bed)
    yield started
    await started.transport.close()


async def test_nothing_is_kept_of_peers_that_are_gone(moving: Moving) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        endpoint = Endpoint("rdma", f"127.0.0.1:{nobody.getsockname()[1]}")
    for number in range(30):
        moving.peer = PeerDescriptor(f"node-{number}", EPOCH, (endpoint,))
        with pytest.raises(TransferFailedError):
            await moving.begin()
    gc.collect()
    assert sum(type(each) is Pairing for each in gc.get_objects()) < 4


@pytest.mark.parametrize("address", ["no address", "256.0.0.1:1", "127.0.0.1:99999"])
async def test_a_peer_to_which_there_is_no_way_fails_the_batch_and_takes_no_queue_pair(
    moving: Moving, address: str
) -> None:
    moving.peer = PeerDescriptor("peer", EPOCH, (Endpoint("rdma", address),))
    with pytest.raises(TransferFailedError, match="cannot connect"):
        await moving.begin()
    assert all(pair.is_closed for pair in moving.rail.pairs)


async def test_an_end_that_is_there_at_once_needs_no_wake_up(moving: Moving) -> None:
    moving.rail.is_prompt = True
    for _ in range(3):
        await asyncio.wait_for(moving.begin(), 60)
        assert not moving.has_told()


async def test_a_later_end_wakes_each_that_waits_and_nobody_afterwards(moving: Moving) -> None:
    batches = [moving.begin() for _ in range(2)]
    await moving.until_posted(2)
    [pair] = moving.rail.pairs
    for batch, (work_id, _) in zip(batches, pair.posted, strict=True):
        assert not batch.done()
        moving.rail.tell(Ended(pair.end.number, work_id, "", False))
        await asyncio.wait_for(batch, 60)
    assert not moving.rail.is_armed


async def test_what_ended_before_the_rail_was_armed_is_seen_all_the_same(moving: Moving) -> None:
    moving.rail.finishes_when_armed = True
    await asyncio.wait_for(moving.begin(), 60)
    assert not moving.has_told()
