"""Copies between GPUs without a GPU: host memory is copied by the table that a kernel would get."""

import asyncio
import random

import numpy as np
import pytest

from base.errors import ProtocolError
from base.grants import Operation
from tests.transfer.gpu.fake_device import HostStream
from transfer.batch import Pieces, Priority, pieces_of, require_allowed
from transfer.gpu.launcher import MAX_LAUNCHES, NUM_ROWS, ROW_BYTES, Launcher
from transfer.owned import segment as segments
from transfer.owned.ranges import ranges_of, with_table

NUM_BYTES = 4 << 20


def memory(seed: int) -> segments.Segment:
    return segments.over(seed, bytearray(random.Random(seed).randbytes(NUM_BYTES)))


def checked(operation: Operation, ours: segments.Segment, sources, targets, length) -> Pieces:
    sides = (sources, targets) if operation is Operation.WRITE else (targets, sources)
    pieces = pieces_of(ours, *sides, length)
    require_allowed(with_table(ranges_of((0,), NUM_BYTES)), pieces)
    return pieces


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("length", [16, 4 << 10, 64 << 10, "differs", "merges"])
async def test_rows_say_what_was_asked_for(operation: Operation, length: int | str) -> None:
    rng = random.Random(5)
    ours, theirs = memory(1), memory(2)
    if length == "differs":
        places = [0, 1 << 20, 3 << 20]
        sources, targets, lengths = places, places[::-1], [16, 1 << 20, 48]
    elif length == "merges":
        places = list(range(0, NUM_BYTES, 256))
        sources, targets, lengths = places, places, 256
    else:
        places = list(range(0, NUM_BYTES, max(length, 512)))
        sources, targets, lengths = rng.sample(places, len(places)), rng.sample(places, len(places)), length
    pieces = checked(operation, ours, sources, targets, lengths)
    source, target = (ours, theirs) if operation is Operation.WRITE else (theirs, ours)
    expected = bytearray(target.memory)
    for begin, size, end in pieces_of(ours, sources, targets, lengths).numbers.T.tolist():
        expected[end : end + size] = source.memory[begin : begin + size]
    streams: list[HostStream] = []
    launcher = launcher_of(streams)
    await launcher.copy(operation, pieces, theirs.address, False, Priority.FOREGROUND)
    launcher.close()
    assert target.memory == expected
    if length == "merges":
        # A run that is longer than a row may be.
        assert [each for stream in streams for each in stream.started] == [NUM_BYTES // ROW_BYTES]


async def test_a_batch_of_more_rows_than_there_is_room_for_gets_room() -> None:
    ours, theirs = memory(1), memory(2)
    places = np.arange(0, 2 * NUM_ROWS + 2) * 256
    launcher = launcher_of([])
    pieces = checked(Operation.WRITE, ours, places, places[::-1], 16)
    await launcher.copy(Operation.WRITE, pieces, theirs.address, False, Priority.FOREGROUND)
    launcher.close()
    last = int(places[-1])
    assert theirs.memory[:16] == ours.memory[last : last + 16]


@pytest.mark.parametrize(("offset", "length"), [(8, 16), (0, 24)])
async def test_what_is_not_aligned_is_refused_and_the_slot_is_free_again(offset: int, length: int) -> None:
    ours, theirs = memory(1), memory(2)
    launcher = launcher_of([])
    for lengths in (length, [length, length]):
        pieces = checked(Operation.WRITE, ours, [offset, 1024], [0, 1024], lengths)
        for _ in range(MAX_LAUNCHES + 1):
            with pytest.raises(ProtocolError, match="multiples of 16"):
                await launcher.copy(Operation.WRITE, pieces, theirs.address, False, Priority.FOREGROUND)
    launcher.close()


def gated_launcher() -> tuple[list[HostStream], Launcher]:
    """Return a launcher whose copies end when their stream's gate is opened, and the streams."""
    streams: list[HostStream] = []
    launcher = launcher_of(streams)
    for stream in streams:
        stream.gate.clear()
    return streams, launcher


async def test_more_copies_than_slots_wait_and_a_failure_concerns_its_own() -> None:
    ours, theirs = memory(1), memory(2)
    streams, launcher = gated_launcher()
    streams[0].failure = RuntimeError("device lost")
    pieces = checked(Operation.WRITE, ours, [0, 1024], [0, 1024], 16)

    async def copy() -> str:
        try:
            await launcher.copy(Operation.WRITE, pieces, theirs.address, False, Priority.FOREGROUND)
        except RuntimeError as error:
            return str(error)
        return "copied"

    tasks = [asyncio.create_task(copy()) for _ in range(2 * MAX_LAUNCHES)]
    await asyncio.sleep(0)
    assert sum(len(stream.started) for stream in streams) == MAX_LAUNCHES
    for stream in streams:
        stream.gate.set()
    outcomes = await asyncio.gather(*tasks)
    launcher.close()
    assert sum(len(stream.started) for stream in streams) == 2 * MAX_LAUNCHES
    assert set(outcomes) == {"device lost", "copied"}
    assert outcomes.count("device lost") == len(streams[0].started)


@pytest.mark.parametrize("fault", [OSError, MemoryError, ValueError])
async def test_a_fault_that_nobody_foresaw_fails_its_copy_and_no_later_one(fault: type[Exception]) -> None:
    streams, launcher = gated_launcher()
    ours, theirs = memory(1), memory(2)
    pieces = checked(Operation.WRITE, ours, [0], [0], NUM_BYTES)
    for stream in streams:
        stream.failure = fault("nobody foresaw this")
        stream.gate.set()

    async def copy() -> None:
        await launcher.copy(Operation.WRITE, pieces, theirs.address, False, Priority.FOREGROUND)

    async with asyncio.timeout(60):
        with pytest.raises(fault):
            await copy()
        for stream in streams:
            stream.failure = None
        await copy()
    assert theirs.memory == ours.memory
    launcher.close()


async def test_a_cancelled_copy_ends_before_its_memory_is_the_callers_again() -> None:
    ours, theirs = memory(1), memory(2)
    streams, launcher = gated_launcher()
    pieces = checked(Operation.WRITE, ours, [0, 1024], [0, 1024], 16)
    copying = asyncio.create_task(
        launcher.copy(Operation.WRITE, pieces, theirs.address, False, Priority.FOREGROUND)
    )
    await asyncio.sleep(0)
    copying.cancel()
    await asyncio.sleep(0)
    assert not copying.done()
    for stream in streams:
        stream.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    launcher.close()
    assert theirs.memory[:16] == ours.memory[:16]


def launcher_of(streams: list[HostStream]) -> Launcher:
    def make_stream() -> HostStream:
        streams.append(HostStream())
        return streams[-1]

    return Launcher(make_stream, asyncio.get_running_loop())
