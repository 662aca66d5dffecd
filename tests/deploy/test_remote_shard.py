"""A shard of another rank: whatever ends a call there, rank 0 has an answer, and the right one."""

import asyncio

import pytest

from base.errors import LostError, TransferFailedError
from base.kv_layout import KvPart
from deploy.remote_shard import RemoteShard, ShardServer
from protos import ranks_pb2 as pb

PART = KvPart(0, 2, 0, 2)


class Pipes:
    """Two ends in one process: what is sent arrives at once, or together when a test says so."""

    def __init__(self, shard):
        self.answers = []
        self.held = None
        self._server = ShardServer(shard, self._answered)

    def on_message(self, rank, listener):
        self._listener = listener

    def send(self, rank, message):
        if self.held is None:
            self._server.receive(message)
        else:
            self.held.append(message)

    async def arrive(self, count):
        """Deliver, in one turn of the loop, `count` messages that were held."""
        while len(self.held) < count:
            await asyncio.sleep(0)
        for message in self.held:
            self._server.receive(message)

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


def ends(outcome):
    shard = Shard(outcome)
    pipes = Pipes(shard)
    return shard, pipes, RemoteShard(pipes, 1, PART)


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
