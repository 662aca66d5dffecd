"""Copies over shared memory: which of them let others have the interpreter, the loop or the thread."""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from base.clock import Clock, SystemClock
from base.config import TransferConfig
from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Grant, Operation
from tests.manual_clock import ManualClock
from transfer.agent import TransferAgent
from transfer.batch import Priority, pieces_of
from transfer.owned.segment import Segment
from transfer.shm.copies import BACKGROUND_STEP_BYTES
from transfer.shm.transport import IN_TURNS_BYTES, INLINE_BYTES, TURN_BYTES

CONFIG = TransferConfig(transports=("shm",))
BLOCK = 64 << 10


@asynccontextmanager
async def pair(askers: Clock | None = None) -> AsyncIterator[tuple[TransferAgent, TransferAgent]]:
    """`askers`: the clock of who asks."""
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock()) as owner,
        TransferAgent("them", 2, CONFIG, askers or SystemClock()) as asker,
    ):
        yield owner, asker


@pytest.mark.parametrize(
    ("block", "num_blocks", "lettings_go"),
    [
        (BLOCK, INLINE_BYTES // BLOCK, 0),
        (INLINE_BYTES, 1, 0),
        (IN_TURNS_BYTES, 1, 0),
        (IN_TURNS_BYTES + 1, 1, 1),
        (BLOCK, (IN_TURNS_BYTES + INLINE_BYTES) // BLOCK, 4),
    ],
    ids=["small blocks", "one block", "one in turns", "one larger block", "many small blocks"],
)
async def test_a_copy_lets_go_of_the_interpreter_once_in_four_mib_and_not_for_each_block(
    monkeypatch: pytest.MonkeyPatch, block: int, num_blocks: int, lettings_go: int
) -> None:
    seen = []
    memmove = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda *call: seen.append(call[2]) or memmove(*call))
    # With gaps between them, or they would be one.
    offsets = [2 * block * index for index in range(num_blocks)]
    async with pair() as (owner, asker):
        target, source = owner.allocate(2 * block * num_blocks), asker.allocate(2 * block * num_blocks)
        source.memory[:] = b"\7" * source.num_bytes
        grant = owner.grant(target, offsets, block, Operation.WRITE, 10.0)
        await asker.write(owner.descriptor, grant, pieces_of(source, offsets, offsets, block))
        assert len(seen) == lettings_go
        assert bytes(target.memory) == (b"\7" * block + bytes(block)) * num_blocks


@asynccontextmanager
async def writing_in_turns() -> AsyncIterator[tuple[TransferAgent, Grant, Segment, asyncio.Future[None]]]:
    """Have begun to write sevens, as many as are copied in turns: the first turn is over."""
    async with pair() as (owner, asker):
        target, source = owner.allocate(IN_TURNS_BYTES), asker.allocate(IN_TURNS_BYTES)
        source.memory[:] = b"\7" * source.num_bytes
        grant = owner.grant(target, [0], IN_TURNS_BYTES, Operation.WRITE, 10.0)
        whole = pieces_of(source, [0], [0], IN_TURNS_BYTES)
        writing = asyncio.ensure_future(asker.write(owner.descriptor, grant, whole))
        await asyncio.sleep(0)
        yield owner, grant, target, writing


async def test_a_batch_of_some_mib_leaves_the_loop_to_others_while_it_is_copied() -> None:
    async with writing_in_turns() as (_, _, target, writing):
        assert (target.memory[TURN_BYTES - 1], target.memory[TURN_BYTES]) == (7, 0)
        await writing
        assert target.memory[-1] == 7


async def test_a_grant_that_is_revoked_between_two_turns_of_a_batch_ends_it_there() -> None:
    async with writing_in_turns() as (owner, grant, target, writing):
        await owner.revoke(grant)
        with pytest.raises(StaleError):
            await writing
        assert bytes(target.memory[TURN_BYTES:]) == bytes(IN_TURNS_BYTES - TURN_BYTES)


async def test_what_a_request_waits_for_is_copied_before_and_amid_what_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first background copy is let go on only when everything else waits for the thread."""
    size, begun, gate = 3 * BACKGROUND_STEP_BYTES, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    steps: list[int] = []
    memmove = ctypes.memmove

    def slow(target: int, source: int, length: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait(60)
        steps.append(length)
        memmove(target, source, length)

    monkeypatch.setattr(ctypes, "memmove", slow)
    async with pair() as (owner, asker):
        target, source = owner.allocate(size), asker.allocate(size)
        grant = owner.grant(target, [0], size, Operation.WRITE, 60.0)

        async def write(num_bytes: int, priority: Priority) -> None:
            batch = pieces_of(source, [0], [0], num_bytes)
            await asker.write(owner.descriptor, grant, batch, priority=priority)

        async with asyncio.TaskGroup() as group:
            group.create_task(write(size, Priority.BACKGROUND))
            await begun.wait()
            group.create_task(write(size, Priority.BACKGROUND))
            group.create_task(write(IN_TURNS_BYTES + 1, Priority.FOREGROUND))
            await asyncio.sleep(0)
            gate.set()
    assert steps == [BACKGROUND_STEP_BYTES, IN_TURNS_BYTES + 1] + [BACKGROUND_STEP_BYTES] * 5


@pytest.mark.parametrize("operation", Operation)
async def test_one_small_request_is_carried_out_at_once_and_refused_as_any_other(
    operation: Operation,
) -> None:
    # By its clock no time passes: after a millisecond of a busy machine it would let others go on.
    async with pair(ManualClock()) as (owner, asker):
        theirs, ours = owner.allocate(2 * BLOCK), asker.allocate(2 * BLOCK)
        source, target = (ours, theirs) if operation is Operation.WRITE else (theirs, ours)
        source.memory[:] = b"\7" * source.num_bytes
        grant = owner.grant(theirs, [0], BLOCK, operation, 10.0)
        move = asker.write if operation is Operation.WRITE else asker.read

        def moved(offset: int) -> None:
            """Nothing else runs before it is over."""
            with pytest.raises(StopIteration):
                move(owner.descriptor, grant, pieces_of(ours, [offset], [offset], 16)).send(None)

        moved(BLOCK - 16)
        assert target.memory == bytes(BLOCK - 16) + b"\7" * 16 + bytes(BLOCK)
        for outside in (BLOCK - 15, -16, 2 * BLOCK):
            with pytest.raises(ProtocolError):
                moved(outside)
        await owner.revoke(grant)
        with pytest.raises(StaleError):
            moved(0)
        assert target.memory[0] == 0


async def test_small_requests_leave_the_loop_to_others_after_a_millisecond() -> None:
    async with pair() as (owner, asker):
        target, source = owner.allocate(INLINE_BYTES), asker.allocate(INLINE_BYTES)
        grant = owner.grant(target, [0], INLINE_BYTES, Operation.WRITE, 10.0)
        batch = pieces_of(source, [0], [0], INLINE_BYTES)
        others: list[None] = []
        asyncio.get_running_loop().call_soon(others.append, None)
        num_batches = 0
        while not others:
            await asker.write(owner.descriptor, grant, batch)
            num_batches += 1
        assert num_batches < 1000


async def test_a_large_batch_for_which_no_thread_could_be_had_is_not_copied_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_bytes = IN_TURNS_BYTES + BLOCK
    async with pair() as (owner, asker):
        target, source = owner.allocate(2 * num_bytes), asker.allocate(num_bytes)
        source.memory[:] = b"\7" * num_bytes
        grant = owner.grant(target, (0, num_bytes), num_bytes, Operation.WRITE, 10.0)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(TransferFailedError, match="can't start new thread"):
                await asker.write(owner.descriptor, grant, pieces_of(source, [0], [0], num_bytes))
        await asker.write(owner.descriptor, grant, pieces_of(source, [0], [num_bytes], num_bytes))
        assert target.memory[:num_bytes] == bytes(num_bytes)
        assert target.memory[num_bytes:] == b"\7" * num_bytes


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
