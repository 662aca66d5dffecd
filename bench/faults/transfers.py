"""Transfers between two agents of this process, most of them hurt on the way by `bench/faults/transport.py`.

What the owner of the memory accepts, by the checksums that its writer made, is compared with what
was sent: a row of the fault matrix, and the subject of tests/transfer/test_faults.py.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Self

from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import ServeError, StaleError, TransferFailedError
from base.grants import Operation
from bench.faults.transport import Fault, FaultyTransport
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.grant import NUM_SLOTS
from transfer.transport import Transport

BLOCK = 512
NUM_BLOCKS = 64
SILENT = (Fault.FLIP, Fault.TRUNCATE, Fault.DROP, Fault.MISPLACE)
HARMLESS = (None, Fault.DUPLICATE, Fault.REORDER)
RAISING = (Fault.FAIL, Fault.LATE)
LEASE_S = 60.0
PIECE = 20_000
"""The number of transfers in a piece, which has agents of its own and ends with a line of progress."""


class CorruptError(AssertionError):
    """Bytes were accepted that nobody sent."""


class Pair:
    """Two agents; what the first sends suffers the fault of `plan`."""

    def __init__(self, transport: str) -> None:
        self.plan: Fault | None = None
        self._config = TransferConfig(transports=(transport,))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
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

    def _wrap(self, inner: Transport) -> FaultyTransport:
        self.faulty = FaultyTransport(inner, lambda: self.plan)
        return self.faulty

    async def deliver_late(self) -> list[ServeError | None]:
        return await self.faulty.deliver_late()

    async def send(self, rng: random.Random, fault: Fault | None) -> bool:
        """Write some blocks; return whether the owner, by checksums, accepts them.

        Raises:
            CorruptError: what it accepts is not what was sent.
        """
        self.plan = fault
        sources = [index * BLOCK for index in rng.sample(range(NUM_BLOCKS), 3)]
        targets = [index * BLOCK for index in rng.sample(range(NUM_BLOCKS), 3)]
        for source in sources:
            self.ours.memory[source : source + BLOCK] = rng.randbytes(BLOCK)
        sums = [checksum(self.ours.memory[source : source + BLOCK]) for source in sources]
        grant = self.owner.grant(self.theirs, targets, BLOCK, Operation.WRITE, LEASE_S)
        batch = pieces_of(self.ours, sources, targets, BLOCK)
        try:
            await self.asker.write(self.owner.descriptor, grant, batch)
        except TransferFailedError:
            return False
        finally:
            await self.owner.revoke(grant)
        accepted = sums == [checksum(self.theirs.memory[target : target + BLOCK]) for target in targets]
        if accepted and any(
            self.theirs.memory[target : target + BLOCK] != self.ours.memory[source : source + BLOCK]
            for source, target in zip(sources, targets, strict=True)
        ):
            raise CorruptError(f"{fault} was accepted")
        return accepted


async def send_many(pair: Pair, rng: random.Random, count: int) -> Counter[str]:
    """Make so many transfers, of which 8 in 10 are hurt; return how many had each fault.

    Raises:
        CorruptError: a hurt one was accepted, a sound one refused, a late one carried out, or a
            grant is left.
    """
    faults = [None, None, *sorted((*SILENT, *RAISING, *HARMLESS[1:]), key=str)]
    injected: Counter[str] = Counter()
    for number in range(count):
        fault = rng.choice(faults)
        injected[fault.value if fault else "none"] += 1
        if await pair.send(rng, fault) != (fault in HARMLESS):
            raise CorruptError(f"{fault} was taken for the opposite of what it is")
        if number % 64 == 0:
            outcomes = await pair.deliver_late()
            if not all(isinstance(outcome, StaleError) for outcome in outcomes):
                raise CorruptError(f"late writes came to {outcomes}")
            if pair.owner.num_grants:
                raise CorruptError(f"{pair.owner.num_grants} grants are left")
    return injected


async def soak(transport: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Make `count` transfers; return what was injected, and what memory did after the first tenth."""
    rng = random.Random(seed)
    async with Pair(transport) as pair:
        for _ in range(NUM_SLOTS):
            # Every slot remembers the last grant it held.
            apart = (BLOCK, 3 * BLOCK, 5 * BLOCK)
            await pair.owner.revoke(pair.owner.grant(pair.theirs, apart, BLOCK, Operation.WRITE, LEASE_S))
        injected = await send_many(pair, rng, count // 10)
        objects = _objects()
        injected += await send_many(pair, rng, count - count // 10)
        return {
            "injected": injected,
            "grants_left": pair.owner.num_grants,
            "objects_more": _objects() - objects,
        }


def _objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def transfers_hurt(count: int) -> dict[str, Any]:
    """Return the row: pieces of at most PIECE transfers, over tcp and over shared memory in turn.

    Another count draws other transfers, so that a million may be shared out over runs.
    """
    injected: Counter[str] = Counter()
    objects_more, grants_left, peaks_kib = 0, 0, []
    for number in range(max(2, count // PIECE)):
        piece = min(PIECE, count // 2)
        found = asyncio.run(soak(("tcp", "shm")[number % 2], piece, count + number))
        injected += found["injected"]
        objects_more = max(objects_more, found["objects_more"])
        grants_left += found["grants_left"]
        peaks_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(f"{injected.total()} transfers, peak RSS {peaks_kib[-1]} KiB", flush=True)
    return {
        "transfers": injected.total(),
        "hurt": injected.total() - injected["none"],
        "injected": dict(sorted(injected.items())),
        "corrupt_accepted": 0,  # or it would have ended with CorruptError
        "grants_left": grants_left,
        "objects_more_in_a_piece": objects_more,
        "peak_rss_kib_after_two_pieces_and_at_the_end": [peaks_kib[1], peaks_kib[-1]],
    }
