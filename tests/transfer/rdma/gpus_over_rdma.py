"""Two agents with memory of a GPU each, over this host's NICs. The GPU is a memfd, and so is its DMA-BUF.

python -m tests.transfer.rdma.gpus_over_rdma        prints {transport: batches}, once every byte arrived
"""

import asyncio
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from tests.transfer.carried import Carried
from tests.transfer.gpu.fake_device import HostAccess
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import DeviceMemory, address_of
from transfer.rdma import transport
from transfer.rdma.dma_buf import PAGE_BYTES

NUM_BYTES = 1 << 20
BLOCK = 64 << 10
BEGINS = 512
OFFSETS = list(range(0, NUM_BYTES, BLOCK))
CONFIG = TransferConfig(transports=("rdma", "tcp"))


class MemfdDriver:
    """Exports its memory as `CudaDriver` does a GPU's."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def memory(self) -> tuple[memoryview, DeviceMemory]:
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, NUM_BYTES + PAGE_BYTES)
        view = memoryview(mmap.mmap(fd, NUM_BYTES + PAGE_BYTES))[BEGINS : BEGINS + NUM_BYTES]
        self._descriptors[address_of(view)] = fd
        return view, DeviceMemory(address_of(view), NUM_BYTES, 0, b"handle", HostAccess())

    def refusal_or_none(self, device: int) -> str | None:
        return None

    def bus_id_or_none(self, device: int) -> str | None:
        return None

    @contextmanager
    def exported(self, device: int, address: int, num_bytes: int) -> Iterator[int]:
        yield self._descriptors[address]


async def main() -> None:
    driver = MemfdDriver()
    transport.CudaDriver = lambda: driver
    carried = Carried()
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock(), observers=[carried]) as us,
        TransferAgent("owner", 2, CONFIG, SystemClock()) as owner,
    ):
        (ours, our_memory), (theirs, their_memory) = driver.memory(), driver.memory()
        here, there = us.register_device(our_memory), owner.register_device(their_memory)
        sent = os.urandom(NUM_BYTES)
        ours[:] = sent
        targets = OFFSETS[::-1]
        grant = owner.grant(there, OFFSETS, BLOCK, Operation.WRITE, 30.0)
        await us.write(owner.descriptor, grant, pieces_of(here, OFFSETS, targets, BLOCK))
        assert all(
            theirs[target : target + BLOCK] == sent[at : at + BLOCK]
            for at, target in zip(OFFSETS, targets, strict=True)
        )
        ours[:] = bytes(NUM_BYTES)
        grant = owner.grant(there, OFFSETS, BLOCK, Operation.READ, 30.0)
        host = us.allocate(NUM_BYTES)
        for segment, memory in ((here, ours), (host, host.memory)):
            await us.read(owner.descriptor, grant, pieces_of(segment, targets, OFFSETS, BLOCK))
            assert memory == sent
        print(json.dumps(carried.batches))


if __name__ == "__main__":
    asyncio.run(main())
