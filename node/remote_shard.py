"""A shard of another rank: what rank 0 asks of it over the pipe, and the rank that answers.

`RemoteShard` is rank 0's end and `ShardServer` the other's. A call that is cancelled is ended at
the rank too, and still waited for: its caller may reuse the blocks once it is over, and only the rank
knows when that is. It is over soon, because the transfer has a deadline of its own. Nobody
waits for a rank that has ended: the node ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from base.codec import TUPLE, message_of
from base.errors import LostError, ServeError, error_named
from base.grants import Grant, RankGrant
from base.kv_layout import KvPart
from base.uninterrupted import uninterrupted
from base.wire import GRANT, PART, PEER, RANK_GRANT
from engine.arrivals import ArrivingBlocks
from engine.ranks import Ranks
from protos import ranks_pb2 as pb
from transfer.shard import BlockMove, KvShard, OnArrived

Answer = asyncio.Future[pb.RankAnswer]
Call = asyncio.Task[pb.RankAnswer]

log = logging.getLogger(__name__)

_MOVE = message_of(
    BlockMove, peer=PEER, grant=GRANT, block_ids=TUPLE, offsets=TUPLE, peer_part=PART, part=PART
)


class RemoteShard:
    """The shard of rank `rank`, as rank 0 sees it. Belongs to the event loop that makes it."""

    def __init__(self, ranks: Ranks, rank: int, part: KvPart) -> None:
        self.part = part
        self._ranks = ranks
        self._rank = rank
        self._num_calls = 0
        self._waiting: dict[int, Answer] = {}
        loop = asyncio.get_running_loop()

        def on_message(message: bytes) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._answered, message)

        ranks.on_message(rank, on_message)

    async def write(self, move: BlockMove) -> None:
        await self._call(pb.RankCall(write=_MOVE.pack(move)))

    async def read(self, move: BlockMove, on_arrived: OnArrived | None = None) -> None:
        comes_in_parts = on_arrived is not None
        message = pb.MoveBlocks(**_MOVE.pack(move), comes_in_parts=comes_in_parts)
        await self._call(pb.RankCall(read=message))

    async def sums(self, block_ids: Sequence[int], part: KvPart) -> list[int]:
        call = pb.RankCall(sum=pb.SumBlocks(block_ids=block_ids, part=PART.pack(part)))
        return list((await self._call(call)).sums)

    def sums_in_order(self, block_ids: Sequence[int], part: KvPart) -> Awaitable[list[int]] | None:
        return None  # steps reach the rank by another path than calls

    async def grant(self, block_ids: Sequence[int], lease_s: float) -> RankGrant:
        call = pb.RankCall(grant=pb.GrantBlocks(block_ids=block_ids, lease_s=lease_s))
        return RANK_GRANT.unpack((await self._call(call)).granted)

    async def revoke(self, grant: Grant) -> None:
        await self._call(pb.RankCall(revoke=GRANT.pack(grant)))

    async def _call(self, call: pb.RankCall) -> pb.RankAnswer:
        self._num_calls += 1
        call.call_id = self._num_calls
        answer: Answer = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = answer
        try:
            self._ranks.send(self._rank, call.SerializeToString())
            found = await asyncio.shield(answer)
        except asyncio.CancelledError:
            await uninterrupted(self._cancelled(call.call_id, answer))
            raise
        finally:
            del self._waiting[call.call_id]
        if found.reason:
            raise error_named(found.reason, found.message)
        return found

    async def _cancelled(self, call_id: int, answer: Answer) -> None:
        with suppress(ServeError):
            cancel = pb.RankCall(call_id=call_id, cancel=pb.CancelCall())
            self._ranks.send(self._rank, cancel.SerializeToString())
            await answer

    def _answered(self, message: bytes) -> None:
        answer = pb.RankAnswer.FromString(message)
        waiting = self._waiting.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class ShardServer:
    """Answers rank 0's calls with this rank's shard. Belongs to the event loop.

    Args:
        arriving: What steps of this rank wait for.
    """

    def __init__(self, shard: KvShard, send: Callable[[bytes], None], arriving: ArrivingBlocks) -> None:
        self._shard = shard
        self._arriving = arriving
        self._send = send
        self._tasks: dict[int, Call] = {}

    def expect(self, message: bytes) -> pb.RankCall:
        """Return a call, for `receive`. Steps that come after it wait for what it loads. Any thread."""
        call = pb.RankCall.FromString(message)
        if call.read.comes_in_parts:
            self._arriving.begin(call.read.block_ids[0])
        return call

    def receive(self, call: pb.RankCall) -> None:
        """Begin with a call, or end one."""
        task = self._tasks.get(call.call_id)
        if not call.HasField("cancel"):
            task = asyncio.get_running_loop().create_task(self._run(call))
            self._tasks[call.call_id] = task
            task.add_done_callback(lambda task: self._ended(call, task))
        elif task is not None:
            task.cancel()

    def _ended(self, call: pb.RankCall, task: Call) -> None:
        """Answer, however the call ended: a task that was cancelled before it began has an end too."""
        del self._tasks[call.call_id]
        if call.read.comes_in_parts:
            self._arriving.end(call.read.block_ids[0])
        answer = _answer_of(task)
        answer.call_id = call.call_id
        self._send(answer.SerializeToString())

    async def _run(self, call: pb.RankCall) -> pb.RankAnswer:
        answer = pb.RankAnswer()
        match call.WhichOneof("call"):
            case "write":
                await self._shard.write(_MOVE.unpack(call.write))
            case "read":
                await self._read(call.read)
            case "sum":
                answer.sums.extend(await self._shard.sums(call.sum.block_ids, PART.unpack(call.sum.part)))
            case "grant":
                granted = await self._shard.grant(call.grant.block_ids, call.grant.lease_s)
                return pb.RankAnswer(granted=RANK_GRANT.pack(granted))
            case "revoke":
                await self._shard.revoke(GRANT.unpack(call.revoke))
        return answer

    async def _read(self, message: pb.MoveBlocks) -> None:
        on_arrived = None
        if message.comes_in_parts:
            on_arrived = partial(self._arriving.arrived, message.block_ids[0])
        await self._shard.read(_MOVE.unpack(message), on_arrived)


def _answer_of(task: Call) -> pb.RankAnswer:
    if task.cancelled():
        return pb.RankAnswer(reason="LostError", message="cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, ServeError):
        log.error("call of rank 0 broke", exc_info=error)
        error = LostError("an error inside the rank; see its log")
    return pb.RankAnswer(reason=type(error).__name__, message=str(error))
