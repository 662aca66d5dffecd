"""An agent that closes with batches under way and more behind them: each ends, and nothing is left."""

import asyncio
import os
import threading

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Operation
from tests.transfer.gpu.fake_device import device_memory
from tests.transfer.rdma.made_up_rails import FakeRail
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.tcp.reactor import Reactor

NUM_BYTES = 32 << 20
NUM_TASKS = 3


def agents(kind: str, monkeypatch) -> tuple[TransferAgent, TransferAgent]:
    def rails(driver):
        rail = FakeRail("rail")
        rail.is_prompt = True
        return [rail], ""

    monkeypatch.setattr("transfer.rdma.transport.open_rails", rails)
    config = TransferConfig(transports=("tcp" if kind == "gpu" else kind,))
    return TransferAgent("us", 1, config, SystemClock()), TransferAgent("owner", 2, config, SystemClock())


GPUS = [bytearray(NUM_BYTES) for _ in range(2)]


def memory(agent: TransferAgent, kind: str, gpu: bytearray):
    return agent.register_device(device_memory(gpu)) if kind == "gpu" else agent.allocate(NUM_BYTES)


@pytest.mark.parametrize("num_turns", [0, 1, 10, 100, 1000])
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("kind", ["tcp", "shm", "rdma", "gpu"])
async def test_batches_under_way_and_those_that_follow_end_when_the_agent_closes(
    kind: str, operation: Operation, num_turns: int, monkeypatch
) -> None:
    us, owner = agents(kind, monkeypatch)
    async with owner:
        await us.start()
        ours, theirs = (memory(agent, kind, gpu) for agent, gpu in zip((us, owner), GPUS, strict=True))
        grant = owner.grant(theirs, (0,), NUM_BYTES, operation, 60.0)
        move = us.write if operation is Operation.WRITE else us.read

        async def move_on() -> None:
            while True:
                await move(owner.descriptor, grant, pieces_of(ours, [0], [0], NUM_BYTES))

        moving = [asyncio.ensure_future(move_on()) for _ in range(NUM_TASKS)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await us.close()
            ends = await asyncio.gather(*moving, return_exceptions=True)
        assert [type(end) for end in ends] == [TransferFailedError] * NUM_TASKS
    assert not [each.name for each in threading.enumerate() if each.name in ("cuda-wait", "transfer")]


def test_what_is_posted_to_a_reactor_that_ended_runs_and_touches_no_descriptor_of_others() -> None:
    reactor, ran = Reactor("test"), []
    reactor.stop()
    # The lowest numbers are taken first: the reactor's own are among these.
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
    reactor.post(lambda: ran.append(1))
    assert ran == [1]
    for other in others:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)
