"""Every injected fault is noticed or harmless, however many; and nothing leaks."""

import gc
import random
import sys
from contextlib import AsyncExitStack

import pytest

from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import StaleError, TransferFailedError
from base.grants import Operation
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.faults import Fault, FaultyTransport
from transfer.grant import NUM_SLOTS

BLOCK = 512
NUM_BLOCKS = 64
SILENT = {Fault.FLIP, Fault.TRUNCATE, Fault.DROP, Fault.MISPLACE}
HARMLESS = {None, Fault.DUPLICATE, Fault.REORDER}
RAISING = {Fault.FAIL, Fault.LATE}


class Pair:
    """Two agents of this process; what the first sends suffers the faults of `plan`."""

    def __init__(self, transport: str) -> None:
        self.plan: Fault | None = None
        self.faulty: FaultyTransport | None = None
        self._config = TransferConfig(transports=(transport,))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Pair":
        clock = SystemClock()
        self.asker = await self._stack.enter_async_context(
            TransferAgent("asker", 1, self._config, clock, self._wrap)
        )
        self.owner = await self._stack.enter_async_context(TransferAgent("owner", 2, self._config, clock))
        self.ours = self.asker.allocate(BLOCK * NUM_BLOCKS)
        self.theirs = self.owner.allocate(BLOCK * NUM_BLOCKS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _wrap(self, inner):
        self.faulty = FaultyTransport(inner, lambda: self.plan)
        return self.faulty

    async def send(self, rng: random.Random, fault: Fault | None) -> bool:
        """Write some blocks; return whether the owner, by checksums, accepts them.

        Asserts that what it accepts is what was sent.
        """
        self.plan = fault
        sources = [index * BLOCK for index in rng.sample(range(NUM_BLOCKS), 3)]
        targets = [index * BLOCK for index in rng.sample(range(NUM_BLOCKS), 3)]
        for source in sources:
            self.ours.memory[source : source + BLOCK] = rng.randbytes(BLOCK)
        sums = [checksum(self.ours.memory[source : source + BLOCK]) for source in sources]
        grant = self.owner.grant(self.theirs, targets, BLOCK, Operation.WRITE, 60.0)
        batch = batch_of(self.ours, sources, targets, BLOCK)
        try:
            await self.asker.write(self.owner.descriptor, grant, batch)
        except TransferFailedError:
            return False
        finally:
            await self.owner.revoke(grant)
        accepted = sums == [checksum(self.theirs.memory[target : target + BLOCK]) for target in targets]
        if accepted:
            for source, target in zip(sources, targets, strict=True):
                sent = self.ours.memory[source : source + BLOCK]
                assert self.theirs.memory[target : target + BLOCK] == sent
        return accepted


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("fault", [None, *sorted(SILENT | HARMLESS - {None} | RAISING, key=str)])
async def test_a_fault_is_noticed_or_harmless(transport: str, fault: Fault | None) -> None:
    async with Pair(transport) as pair:
        assert await pair.send(random.Random(3), fault) == (fault in HARMLESS)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_late_write_is_stale_and_touches_nothing(transport: str) -> None:
    async with Pair(transport) as pair:
        await pair.send(random.Random(1), Fault.LATE)
        before = bytes(pair.theirs.memory)
        outcomes = await pair.faulty.deliver_late()
        assert [type(outcome) for outcome in outcomes] == [StaleError]
        assert pair.theirs.memory == before


async def send_many(pair: Pair, rng: random.Random, count: int) -> None:
    faults = [None, None, *sorted(SILENT | RAISING | HARMLESS - {None}, key=str)]
    for number in range(count):
        fault = rng.choice(faults)
        assert await pair.send(rng, fault) == (fault in HARMLESS)
        if number % 64 == 0:
            outcomes = await pair.faulty.deliver_late()
            assert all(isinstance(outcome, StaleError) for outcome in outcomes)
            assert pair.owner.num_grants == 0


async def soak(transport: str, count: int) -> int:
    """Return how many more objects are alive after all the transfers than after a tenth."""
    rng = random.Random(count)
    async with Pair(transport) as pair:
        for _ in range(NUM_SLOTS):
            # Every slot remembers the last grant it held.
            apart = (BLOCK, 3 * BLOCK, 5 * BLOCK)
            await pair.owner.revoke(pair.owner.grant(pair.theirs, apart, BLOCK, Operation.WRITE, 60.0))
        await send_many(pair, rng, count // 10)
        gc.collect()
        before = sys.getallocatedblocks()
        await send_many(pair, rng, count - count // 10)
        gc.collect()
        return sys.getallocatedblocks() - before


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_thousands_of_transfers_accept_nothing_corrupt_and_leak_nothing(transport: str) -> None:
    assert await soak(transport, 2_000) < 4_000


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_million_transfers_accept_nothing_corrupt_and_leak_nothing(transport: str) -> None:
    assert await soak(transport, 500_000) < 4_000
