"""GPUs' memory over tcp, by way of host memory: what stands for the GPUs is in `fake_device.py`."""

import asyncio
import random
import threading
from contextlib import asynccontextmanager

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Operation
from tests.transfer.carried import Carried
from tests.transfer.descriptors import descriptors
from tests.transfer.gpu.fake_device import HostAccess, device_memory
from tests.uncollected import uncollected
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.gpu.staged import NUM_BUFFERS, PART_BYTES, PARTS_AT_ONCE
from transfer.owned.board import MAX_SEGMENTS

BLOCK = 192 << 10
NUM_BLOCKS = 3 * PART_BYTES // BLOCK
NUM_MOVED = NUM_BLOCKS - 20
"""More than two parts."""
CONFIG = TransferConfig(transports=("tcp",))


class Gpu:
    """One process's."""

    def __init__(self, agent, seed):
        self.memory = bytearray(random.Random(seed).randbytes(NUM_BLOCKS * BLOCK))
        self.access = HostAccess()
        self.segment = agent.register_device(device_memory(self.memory, self.access))

    def block(self, number):
        return self.memory[number * BLOCK : (number + 1) * BLOCK]


@asynccontextmanager
async def two_gpus(observers=()):
    """Return the asking agent, its GPU, the owner and its GPU."""
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock(), observers=observers) as us,
        TransferAgent("owner", 2, CONFIG, SystemClock()) as owner,
    ):
        yield us, Gpu(us, 1), owner, Gpu(owner, 2)


def granted(owner, gpu, operation):
    offsets = range(0, NUM_BLOCKS * BLOCK, BLOCK)
    return owner.grant(gpu.segment, list(offsets), BLOCK, operation, 30.0)


def shuffled(ours):
    """Return a batch of most blocks, in places of their own on each side, and (ours, theirs) of each."""
    here, there = (random.Random(seed).sample(range(NUM_BLOCKS), NUM_MOVED) for seed in (3, 4))
    at = [[number * BLOCK for number in numbers] for numbers in (here, there)]
    return pieces_of(ours.segment, *at, BLOCK), list(zip(here, there, strict=True))


def num_waiting():
    """Return how many threads wait for GPUs' copies."""
    return sum(thread.name == "cuda-wait" for thread in threading.enumerate())


async def test_scattered_blocks_of_several_parts_are_written_and_read():
    async with two_gpus() as (us, ours, owner, theirs):
        batch, places = shuffled(ours)
        untouched = {n: theirs.block(n) for n in range(NUM_BLOCKS)} | {n: None for _, n in places}
        await us.write(owner.descriptor, granted(owner, theirs, Operation.WRITE), batch)
        assert all(ours.block(here) == theirs.block(there) for here, there in places)
        assert all(theirs.block(n) == kept for n, kept in untouched.items() if kept is not None)
        theirs.memory[:] = random.Random(5).randbytes(len(theirs.memory))
        await us.read(owner.descriptor, granted(owner, theirs, Operation.READ), batch)
        assert all(ours.block(here) == theirs.block(there) for here, there in places)


async def test_host_memory_and_a_gpus_reach_each_other():
    async with two_gpus() as (us, _, owner, theirs):
        ours = us.allocate(BLOCK)
        ours.memory[:] = random.Random(6).randbytes(BLOCK)
        await us.write(
            owner.descriptor, granted(owner, theirs, Operation.WRITE), pieces_of(ours, [0], [BLOCK], BLOCK)
        )
        assert theirs.block(1) == ours.memory
        await us.read(
            owner.descriptor, granted(owner, theirs, Operation.READ), pieces_of(ours, [0], [2 * BLOCK], BLOCK)
        )
        assert theirs.block(2) == ours.memory


async def test_more_batches_than_buffers_all_end():
    carried = Carried()
    async with two_gpus([carried]) as (us, ours, owner, theirs):
        grant = granted(owner, theirs, Operation.WRITE)
        async with asyncio.TaskGroup() as group:
            for number in range(3 * NUM_BUFFERS):
                at = [number * BLOCK]
                group.create_task(us.write(owner.descriptor, grant, pieces_of(ours.segment, at, at, BLOCK)))
        assert all(ours.block(number) == theirs.block(number) for number in range(3 * NUM_BUFFERS))
        assert carried.batches == {"staged_tcp": 3 * NUM_BUFFERS}


@pytest.mark.parametrize("side", ["ours", "theirs"])
@pytest.mark.parametrize("operation", Operation)
async def test_a_gpu_that_fails_fails_the_batch_and_takes_no_buffer_with_it(side, operation):
    async with two_gpus() as (us, ours, owner, theirs):
        grant = granted(owner, theirs, operation)
        move = us.write if operation is Operation.WRITE else us.read
        batch, places = shuffled(ours)
        await move(owner.descriptor, grant, batch)
        failing = ours if side == "ours" else theirs
        for stream in failing.access.streams:
            stream.failure = RuntimeError("an illegal memory access")
        for _ in range(NUM_BUFFERS + 1):
            with pytest.raises(TransferFailedError, match="an illegal memory access"):
                await move(owner.descriptor, grant, batch)
        for stream in failing.access.streams:
            stream.failure = None
        failing.memory[:] = random.Random(7).randbytes(len(failing.memory))
        await move(owner.descriptor, grant, batch)
        assert all(ours.block(here) == theirs.block(there) for here, there in places)


async def test_a_batch_that_finds_no_pinned_memory_fails_alone_on_either_side():
    async with two_gpus() as (us, ours, owner, theirs):
        grant = granted(owner, theirs, Operation.WRITE)
        batch, places = shuffled(ours)
        for access in (ours.access, theirs.access):
            access.pinned_left, waiting = 0, num_waiting()
            with pytest.raises(TransferFailedError, match="out of memory"):
                await us.write(owner.descriptor, grant, batch)
            assert access is theirs.access or num_waiting() == waiting
            access.pinned_left = 1 << 40
        await us.write(owner.descriptor, grant, batch)
        assert all(ours.block(here) == theirs.block(there) for here, there in places)


async def failed(move, kind):
    try:
        await move
    except kind:
        return True


async def ends_the_grant(owner, grant, ours):
    await owner.revoke(grant)


async def takes_the_memory(owner, grant, ours):
    ours.access.pinned_left = 0


async def breaks_the_gpu(owner, grant, ours):
    for stream in ours.access.streams:
        stream.failure = RuntimeError("an illegal memory access")


async def cancels(owner, grant, ours):
    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)


FAULTS = {
    ends_the_grant: StaleError,
    takes_the_memory: TransferFailedError,
    breaks_the_gpu: TransferFailedError,
    cancels: asyncio.CancelledError,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_batch_that_fails_leaves_nothing_for_the_garbage_collector(fault):
    async with two_gpus() as (us, ours, owner, theirs):
        grant, (batch, _) = granted(owner, theirs, Operation.WRITE), shuffled(ours)
        if fault is not takes_the_memory:
            await us.write(owner.descriptor, grant, batch)
        with uncollected() as left:
            for _ in range(2):
                await fault(owner, grant, ours)
                assert await failed(us.write(owner.descriptor, grant, batch), FAULTS[fault])
            for stream in ours.access.streams:
                stream.failure = None
            await asyncio.sleep(0)
            assert left(BaseException) == []


async def test_what_the_gpu_cannot_copy_is_refused_whole_by_either_side():
    async with two_gpus() as (us, ours, owner, theirs):
        grant, before = granted(owner, theirs, Operation.WRITE), bytes(theirs.memory)
        with pytest.raises(ProtocolError, match="multiples of 16"):
            await us.write(owner.descriptor, grant, pieces_of(ours.segment, [0], [0], 100))
        host = us.allocate(BLOCK)
        with pytest.raises(ProtocolError, match="multiples of 16"):
            await us.write(owner.descriptor, grant, pieces_of(host, [0], [8], 16))
        assert theirs.memory == before


async def test_a_write_that_is_cancelled_while_the_gpu_copies_ends_after_the_copy():
    async with two_gpus() as (us, ours, owner, theirs):
        grant = granted(owner, theirs, Operation.WRITE)
        batch, _ = shuffled(ours)
        await us.write(owner.descriptor, grant, batch)
        for stream in ours.access.streams:
            stream.gate.clear()
            stream.started.clear()
        writing = asyncio.ensure_future(us.write(owner.descriptor, grant, batch))
        while not any(stream.started for stream in ours.access.streams):
            await asyncio.sleep(0)
        writing.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not writing.done()
        for stream in ours.access.streams:
            stream.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await us.write(owner.descriptor, grant, batch)


async def test_a_gpu_for_which_there_is_no_room_is_not_registered_and_can_be_tried_again():
    config = TransferConfig(transports=("tcp", "shm"))
    async with TransferAgent("us", 1, config, SystemClock()) as us:
        access, memory = HostAccess(), bytearray(BLOCK)
        before, access.pinned_left = descriptors(), 0
        # More often than there is room for on the board.
        for _ in range(MAX_SEGMENTS + 1):
            with pytest.raises(TransferFailedError, match="out of memory"):
                us.register_device(device_memory(memory, access))
        assert descriptors() == before
        access.pinned_left = 1 << 40
        us.register_device(device_memory(memory, access))


async def test_a_write_that_is_cancelled_while_one_part_of_it_ends_after_another_failed_is_cancelled():
    """Told of the failure instead, the router would go on by another transport, with no deadline any more."""
    async with two_gpus() as (us, ours, owner, theirs):
        grant = granted(owner, theirs, Operation.WRITE)
        batch, _ = shuffled(ours)
        await us.write(owner.descriptor, grant, batch)
        for stream in ours.access.streams:
            stream.gate.clear()
            stream.started.clear()
        writing = asyncio.ensure_future(us.write(owner.descriptor, grant, batch))
        while len(busy := [stream for stream in ours.access.streams if stream.started]) < PARTS_AT_ONCE:
            await asyncio.sleep(0)
        copying = set(asyncio.all_tasks())
        busy[0].failure = RuntimeError("an illegal memory access")
        busy[0].gate.set()
        # The part that failed was a task.
        while not any(task.done() for task in copying):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.sleep(0)
        for stream in ours.access.streams:
            stream.failure = None
            stream.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await writing


async def test_a_gpu_that_nobody_could_reach_is_refused():
    config = TransferConfig(transports=("rdma",))
    async with TransferAgent("us", 1, config, SystemClock()) as us:
        with pytest.raises(ValueError, match="allow tcp"):
            us.register_device(device_memory(bytearray(BLOCK)))
