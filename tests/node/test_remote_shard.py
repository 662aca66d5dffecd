"""A shard of another rank: whatever ends a call there, rank 0 has an answer, and the right one."""

import asyncio

import pytest

from base.clock import SystemClock
from base.errors import LostError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from base.kv_layout import KvPart
from engine.arrivals import ArrivingBlocks
from node.remote_shard import RemoteShard, ShardServer
from protos import ranks_pb2 as pb
from tests.uncollected import uncollected
from transfer.shard import BlockMove

PART = KvPart(0, 2, 0, 2)


class Pipes:
    """Two ends in one process: what is sent arrives at once, or together when a test says so."""

    def __init__(self, shard, arriving):
        self.answers = []
        self.held = None
        self._server = ShardServer(shard, self._answered, arriving)

    def on_message(self, rank, listener):
        self._listener = listener

    def send(self, rank, message):
        if self.held is None:
            self._receive(message)
        else:
            self.held.append(message)

    async def arrive(self, count):
        """Deliver, in one turn of the loop, `count` messages that were held."""
        while len(self.held) < count:
            await asyncio.sleep(0)
        for message in self.held:
            self._receive(message)

    def _receive(self, message):
        self._server.receive(self._server.expect(message))

    def _answered(self, message):
        self.answers.append(pb.RankAnswer.FromString(message))
        self._listener(message)


class Shard:
    """`KvShard` whose checksums are what a test says: numbers, an error, or nothing for ever."""

    def __init__(self, outcome):
        self._outcome = outcome
        self.asked = asyncio.Event()

    async def sums(self, block_ids, part):
        self.asked.set()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            await asyncio.Event().wait()
        return self._outcome


class ReadShard:
    """`KvShard` whose reads tell of one part, and end when a test says so, maybe with an error."""

    def __init__(self, error=None):
        self._error = error
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def read(self, move, on_arrived=None):
        if on_arrived is not None:
            on_arrived(1)
        self.begun.set()
        await self.may_end.wait()
        if self._error is not None:
            raise self._error


def reading(shard):
    """A shard's ends, and what its steps wait for."""
    arriving = ArrivingBlocks((1, 1), SystemClock())
    pipes = Pipes(shard, arriving)
    return pipes, RemoteShard(pipes, 1, PART), arriving


def read_of(block_ids):
    grant = Grant(1, 2, Operation.READ, (0,) * len(block_ids), 64, 10.0)
    return BlockMove(PeerDescriptor("n", 1, ()), grant, block_ids, grant.offsets, PART, PART, 10.0)


def ends(outcome):
    shard = Shard(outcome)
    pipes, remote, _ = reading(shard)
    return shard, pipes, remote


async def test_a_call_is_answered():
    _, _, remote = ends([5, 6])
    assert await remote.sums([0, 1], PART) == [5, 6]


async def test_an_expected_error_arrives_by_its_name():
    _, _, remote = ends(TransferFailedError("the peer is gone"))
    with pytest.raises(TransferFailedError, match="the peer is gone"):
        await remote.sums([0], PART)


async def test_an_unexpected_error_is_told_as_one_and_logged_with_its_trace(caplog):
    _, _, remote = ends(ZeroDivisionError("a bug"))
    with pytest.raises(LostError, match="an error inside the rank"):
        await remote.sums([0], PART)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_call_that_is_cancelled_is_over_when_the_rank_says_so():
    shard, pipes, remote = ends(None)
    call = asyncio.ensure_future(remote.sums([0], PART))
    await shard.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [(answer.reason, answer.message) for answer in pipes.answers] == [("LostError", "cancelled")]


async def test_a_call_that_is_cancelled_before_it_began_is_answered_too():
    shard, pipes, remote = ends(None)
    pipes.held = []
    call = asyncio.ensure_future(remote.sums([0], PART))
    await asyncio.sleep(0)
    call.cancel()
    await pipes.arrive(2)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [(answer.reason, answer.message) for answer in pipes.answers] == [("LostError", "cancelled")]
    assert not shard.asked.is_set()


async def test_steps_that_are_told_of_after_a_read_wait_for_it_until_it_ends():
    shard = ReadShard()
    pipes, remote, arriving = reading(shard)
    pipes.held = []
    call = asyncio.ensure_future(remote.read(read_of((5, 3)), lambda num_parts: None))
    await asyncio.sleep(0)
    assert arriving.of([5]) == []
    await pipes.arrive(1)
    (arrivals,) = arriving.of([3, 5])  # by its first block, before the call itself has begun
    await shard.begun.wait()
    arrivals.wait(1)
    waiting = asyncio.ensure_future(asyncio.to_thread(arrivals.wait, 2))
    shard.may_end.set()
    await call
    await waiting
    assert arriving.of([5]) == []


async def test_a_read_that_is_waited_for_as_a_whole_is_named_by_no_step():
    shard = ReadShard()
    _, remote, arriving = reading(shard)
    shard.may_end.set()
    await remote.read(read_of((5,)))
    assert arriving.of([5]) == []


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is cancelled before it began"])
async def test_no_step_waits_for_a_read_that_has_ended_somehow(how):
    shard = ReadShard(TransferFailedError("no end") if how == "fails" else None)
    pipes, remote, arriving = reading(shard)
    pipes.held = []
    call = asyncio.ensure_future(remote.read(read_of((5,)), lambda num_parts: None))
    await asyncio.sleep(0)
    if how == "is cancelled before it began":
        call.cancel()
        await pipes.arrive(2)
    else:
        await pipes.arrive(1)
        (arrivals,) = arriving.of([5])
        pipes.held = None
        await shard.begun.wait()
        shard.may_end.set() if how == "fails" else call.cancel()
    with pytest.raises(TransferFailedError if how == "fails" else asyncio.CancelledError):
        await call
    assert arriving.of([5]) == []
    if how != "is cancelled before it began":
        arrivals.wait_for_all()


async def test_an_error_leaves_nothing_for_the_garbage_collector():
    _, _, remote = ends(TransferFailedError("the peer is gone"))

    async def failed():
        try:
            await remote.sums([0], PART)
        except TransferFailedError as error:
            return str(error)

    with uncollected() as left:
        assert await failed() == "the peer is gone"
        await asyncio.sleep(0)
        assert left(asyncio.Future) == []
