"""Holds that are kept: one question for many batches, and none that outlives its grant."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from base.config import TransferConfig
from base.errors import LeaseExpiredError, ProtocolError, StaleError
from base.grants import Grant, Operation
from tests.manual_clock import ManualClock
from tests.transfer.rdma.made_up_rails import FakeRail
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.holdings import Holdings
from transfer.owned.segment import Segment
from transfer.rdma import holds as rdma_holds
from transfer.rdma.holds import Hold, Holds, pack_admission
from transfer.rdma.registrations import Reach

GRANT = Grant(1, 7, Operation.WRITE, (0, 64), 64, 10.0)
LEASE_S = 10.0
REACH = Reach(4096, tuple(range(8)), (4,) * 8)
BLOCK = 4096
OFFSETS = (0, BLOCK, 2 * BLOCK, 3 * BLOCK)


class FakeLink:
    """An owner that admits everything, and is told what is let go."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.num_asked = 0
        self.let_go_ids: list[int] = []
        self.on_answer: Callable[[], None] = lambda: None

    def submit(self, frames) -> None:
        (frame,) = frames
        self.num_asked += 1
        frame.frame_id = self.num_asked
        self.clock.advance(2.0)
        frame.incoming[0][:] = pack_admission(LEASE_S, REACH)
        self.on_answer()
        asyncio.get_running_loop().call_soon(frame.owner.end, None)

    def detach(self, owner) -> None:
        """Leave the answer to come."""

    def let_go(self, frame) -> None:
        self.let_go_ids.append(frame.frame_id)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def link(clock: ManualClock) -> FakeLink:
    return FakeLink(clock)


@pytest.fixture
async def holds(link: FakeLink, clock: ManualClock, monkeypatch) -> AsyncIterator[Holds]:
    # Swept by the tests, never by the timer.
    monkeypatch.setattr(rdma_holds, "SWEEP_S", 3600.0)
    started = Holds(link, clock)
    yield started
    started.close()


async def taken(holds: Holds, grant: Grant = GRANT) -> Hold:
    return holds.take(grant) or await holds.ask(grant)


async def test_the_next_batch_of_a_grant_takes_the_hold_of_the_one_before(
    holds: Holds, link: FakeLink
) -> None:
    for _ in range(3):
        hold = await taken(holds)
        assert hold.reach == REACH
        holds.release(hold)
    assert (link.num_asked, link.let_go_ids) == (1, [])


async def test_a_hold_is_let_go_by_the_second_sweep_after_its_last_batch(
    holds: Holds, link: FakeLink
) -> None:
    hold = await taken(holds)
    holds.sweep()
    holds.sweep()
    holds.release(hold)
    holds.sweep()
    assert link.let_go_ids == []
    holds.sweep()
    assert link.let_go_ids == [1]


async def test_a_recall_ends_an_idle_hold_at_once_and_one_in_use_with_its_last_batch(
    holds: Holds, link: FakeLink
) -> None:
    holds.release(await taken(holds))
    holds.recall(GRANT.generation)
    assert link.let_go_ids == [1]
    first, second = await taken(holds), await taken(holds)
    holds.recall(GRANT.generation)
    assert holds.take(GRANT) is None
    holds.release(first)
    assert link.let_go_ids == [1]
    holds.release(second)
    assert link.let_go_ids == [1, 2]


async def test_a_recall_right_behind_the_answer_has_the_owner_asked_again(
    holds: Holds, link: FakeLink
) -> None:
    def recall_once() -> None:
        link.on_answer = lambda: None
        holds.recall(GRANT.generation)

    link.on_answer = recall_once
    holds.release(await taken(holds))
    assert (link.num_asked, link.let_go_ids) == (2, [1])


async def test_a_lease_is_counted_from_before_it_was_asked_for(holds: Holds, clock: ManualClock) -> None:
    holds.release(await taken(holds))
    clock.advance(LEASE_S - 2.0 - 0.5)
    held = holds.take(GRANT)
    assert held is not None
    holds.release(held)
    clock.advance(0.5)
    assert holds.take(GRANT) is None


async def test_a_grant_that_says_something_else_is_not_covered(holds: Holds) -> None:
    holds.release(await taken(holds))
    assert holds.take(replace(GRANT, offsets=(0, 64, 128))) is None
    assert holds.take(replace(GRANT)) is not None


@pytest.mark.parametrize("seed", range(50))
async def test_every_hold_that_was_given_is_let_go_once(holds: Holds, link: FakeLink, seed: int) -> None:
    rng = random.Random(seed)
    grants = [replace(GRANT, generation=generation) for generation in (1, 2)]
    in_use: list[Hold] = []

    async def use(grant: Grant) -> None:
        in_use.append(await taken(holds, grant))

    for _ in range(100):
        step = rng.randrange(4)
        if step == 0:
            # Two at once: both may ask.
            await asyncio.gather(use(rng.choice(grants)), use(rng.choice(grants)))
        elif step == 1 and in_use:
            holds.release(in_use.pop(rng.randrange(len(in_use))))
        elif step == 2:
            holds.recall(rng.choice(grants).generation)
        else:
            holds.sweep()
        held = {hold.call.frame.frame_id for hold in in_use}
        assert not held & set(link.let_go_ids)
    for hold in in_use:
        holds.release(hold)
    holds.sweep()
    holds.sweep()
    assert sorted(link.let_go_ids) == list(range(1, link.num_asked + 1))


class Pair:
    """An owner and an asker with a rail each, that copies, and a grant on four blocks."""

    def __init__(self, clock: ManualClock, monkeypatch) -> None:
        self.clock = clock
        self.near, self.far = FakeRail("near"), FakeRail("far")
        self.near.copies = self.near.is_prompt = True
        opened = [self.far, self.near]
        monkeypatch.setattr("transfer.rdma.transport.open_rails", lambda driver: ([opened.pop(0)], ""))
        admitted = Holdings.admitted

        def counted(holdings: Holdings, generation: int, digest: int) -> tuple[Segment, float]:
            self.num_admitted += 1
            return admitted(holdings, generation, digest)

        monkeypatch.setattr(Holdings, "admitted", counted)
        self.num_admitted = 0
        """How often the owner was asked."""
        config = TransferConfig(transports=("rdma",))
        self.owner = TransferAgent("owner", 1, config, clock)
        self.asker = TransferAgent("asker", 2, config, clock)
        self.open = [self.asker, self.owner]
        self.target: Segment
        self.source: Segment
        self.grant: Grant

    async def start(self) -> None:
        await self.owner.start()
        await self.asker.start()
        self.target, self.source = (each.allocate(5 * BLOCK) for each in (self.owner, self.asker))
        self.source.memory[:] = b"\1" * self.source.num_bytes
        self.grant = self.owner.grant(self.target, OFFSETS, BLOCK, Operation.WRITE, LEASE_S)
        self.num_admitted = 0

    async def write(self, offset: int = 0, grant: Grant | None = None) -> None:
        batch = pieces_of(self.source, [offset], [offset], BLOCK)
        await self.asker.write(self.owner.descriptor, grant or self.grant, batch)


@pytest.fixture
async def pair(clock: ManualClock, monkeypatch) -> AsyncIterator[Pair]:
    # Neither a timer nor force ends a hold.
    monkeypatch.setattr(rdma_holds, "SWEEP_S", 3600.0)
    monkeypatch.setattr("transfer.agent.CUT_AFTER_S", 3600.0)
    started = Pair(clock, monkeypatch)
    await started.start()
    async with asyncio.timeout(60):
        yield started
    for agent in started.open:
        await agent.close()


async def test_one_leave_serves_batches_on_every_block_of_the_grant(pair: Pair) -> None:
    for offset in (*OFFSETS, *OFFSETS):
        await pair.write(offset)
    assert pair.num_admitted == 1
    assert pair.target.memory == b"\1" * 4 * BLOCK + bytes(BLOCK)


async def test_a_revocation_gets_an_idle_hold_back_and_nothing_is_written_afterwards(pair: Pair) -> None:
    await pair.write()
    await pair.owner.revoke(pair.grant)
    pair.target.memory[:] = bytes(pair.target.num_bytes)
    with pytest.raises(StaleError):
        await pair.write()
    assert not any(pair.target.memory)


async def test_a_revocation_ends_batches_that_follow_each_other_without_a_pause(pair: Pair) -> None:
    async def write_on() -> None:
        while True:
            await pair.write()
            # The agent would do so by its clock, which stands still here.
            await asyncio.sleep(0)

    writing = asyncio.ensure_future(write_on())
    while len(pair.near.pairs) == 0 or len(pair.near.pairs[0].posted) < 20:
        await asyncio.sleep(0)
    await pair.owner.revoke(pair.grant)
    pair.target.memory[:] = bytes(pair.target.num_bytes)
    await asyncio.wait([writing])
    assert isinstance(writing.exception(), StaleError)
    assert not any(pair.target.memory)


async def test_a_revocation_waits_for_the_batch_that_is_under_way(pair: Pair) -> None:
    await pair.write()
    pair.near.is_prompt = False
    writing = asyncio.ensure_future(pair.write(BLOCK))
    while not pair.near.under_way:
        await asyncio.sleep(0)
    revoking = asyncio.ensure_future(pair.owner.revoke(pair.grant))
    await asyncio.wait([revoking], timeout=0.05)
    assert not revoking.done()
    pair.near.finish()
    await asyncio.gather(writing, revoking)
    assert pair.target.memory[: 2 * BLOCK] == b"\1" * 2 * BLOCK


async def test_a_lease_that_ran_out_is_refused_also_where_nobody_told_the_asker(pair: Pair) -> None:
    await pair.write()
    pair.target.memory[:] = bytes(pair.target.num_bytes)
    pair.clock.advance(LEASE_S)
    with pytest.raises(LeaseExpiredError):
        await pair.write()
    assert not any(pair.target.memory)


async def test_a_grant_that_was_widened_is_refused_although_its_hold_is_kept(pair: Pair) -> None:
    await pair.write()
    widened = replace(pair.grant, offsets=(*OFFSETS, 4 * BLOCK))
    with pytest.raises(ProtocolError):
        await pair.write(4 * BLOCK, widened)
    assert not any(pair.target.memory[4 * BLOCK :])


async def test_an_asker_that_leaves_with_a_hold_kept_delays_no_revocation(pair: Pair) -> None:
    await pair.write()
    pair.open.remove(pair.asker)
    await pair.asker.close()
    await pair.owner.revoke(pair.grant)
    assert pair.far.pairs[0].is_closed


async def test_an_asker_whose_loop_was_busy_while_it_was_cut_off_reaches_the_owner_all_the_same(
    pair: Pair,
) -> None:
    await pair.write()
    was_cut = threading.Event()
    # A revocation and its cut, without a turn of this loop, which is the asker's too.
    pair.owner._host.server.detach(pair.grant.generation, lambda: None)
    pair.owner._host.server.cut(pair.grant.generation)
    pair.owner._host.reactors[0].post(was_cut.set)
    was_cut.wait(60)
    assert pair.far.pairs[0].is_closed
    later = pair.owner.grant(pair.target, OFFSETS, BLOCK, Operation.WRITE, LEASE_S)
    await pair.write(BLOCK, later)
    assert pair.target.memory[BLOCK : 2 * BLOCK] == b"\1" * BLOCK
