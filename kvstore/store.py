"""One host's part of the block cache: memory, disk below it, and who may touch the bytes.

Owns the pool's segment, the disk tier and every grant on them. The pool decides; this file
does what it decided: grants before bytes move, revokes before bytes are reused, reads and
writes the disk, and publishes the changes.

A read of blocks that are on disk brings them up into memory first, one lift at a time:
two readers of one chain read it from disk once. Above the pool's high watermark blocks
are written to disk before they leave; a put that finds no room does not wait for that.

`tick` is called once a second, and when memory is crowded: it ends what ran out, makes room,
and checks that every block is accounted for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from base.block_hash import BlockHash
from base.checksum import is_checksum_of
from base.errors import LeaseExpiredError
from base.grants import Grant, Operation
from base.logs import event
from base.metrics import StoreMetrics
from base.uninterrupted import uninterrupted
from kvstore.directory import RedisDirectory
from kvstore.disk import DiskTier
from kvstore.pool import HostPool, Record
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment

log = logging.getLogger(__name__)

PUT_S = 30.0
"""Time from reserve to commit. Longer than a transfer may take (20 s)."""
LEASE_S = 30.0
"""Time for a read, as long for the same reason. Mooncake's 10 s fail slow reads."""
LIFT_S = 8.0
"""Time that a reader gives the disk; after that it has what is in memory. Shorter than a call's limit."""
MAX_PUT_BLOCKS = 2048
"""Blocks of one put from elsewhere, of a delete in one turn of the event loop, and of a lease in one turn.

The end of such a put holds the loop for some 10 ms, and of 8,192 blocks for 130. A longer chain is read,
held and granted in a turn each: of 65,536 blocks 20 ms, 35 and 20."""
UPKEEP_S = 1.0
"""Time that a tick waits for what it has begun."""
_LOWERING = 0
"""No ticket: the work that takes blocks to disk."""
LEAVE_BLOCKS = 64
"""Written to disk in one tick step at most, so that one step is short."""


@dataclass(frozen=True, slots=True)
class OpenPut:
    """Where the missing blocks of a chain may be written; `grant` has an offset for each."""

    ticket: int
    missing: tuple[int, ...]
    grant: Grant | None


@dataclass(frozen=True, slots=True)
class Leased:
    """Where blocks of a chain may be read: an offset and a checksum for each from `first`."""

    ticket: int
    num_blocks: int
    """Leading ones that are held, those before `first` included."""
    grant: Grant | None
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading blocks of a chain are here, and how many of them in memory."""

    num_blocks: int
    num_in_memory: int


class Store:
    """Belongs to the event loop. `close` it before its agent."""

    def __init__(
        self,
        agent: TransferAgent,
        pool: HostPool,
        block_bytes: int,
        disk: DiskTier | None = None,
        metrics: StoreMetrics | None = None,
    ) -> None:
        """Allocate the pool's memory as a segment of `agent`; raises OSError if there is none."""
        self.block_bytes = block_bytes
        self._directory: RedisDirectory | None = None
        self._listeners: list[Callable[[Sequence[BlockHash]], None]] = []
        self._agent = agent
        self.pool = pool
        self.disk = disk
        self._metrics = metrics
        self.segment: Segment = agent.allocate(pool.num_blocks * block_bytes)
        """The pool's memory: block i begins at i * block_bytes."""
        self._put_grants: dict[int, Grant] = {}
        self._lease_grants: dict[int, Grant] = {}
        self._lifting = asyncio.Lock()
        self._lowering = asyncio.Lock()
        self._leaving: set[BlockHash] = set()
        self._upkeep: dict[int, asyncio.Task[None]] = {}
        """Upkeep that is under way, by ticket, or as `_LOWERING`."""
        self.crowded = asyncio.Event()
        """Set when memory is so full that blocks should go to disk before the next second."""
        self.num_damaged = 0
        """Blocks in memory that were found not to be what was stored."""

    def join(self, directory: RedisDirectory) -> None:
        """Publish in `directory` what is held, now and from here on."""
        self._directory = directory
        directory.publish(self.hashes)

    def on_change(self, listener: Callable[[Sequence[BlockHash]], None]) -> None:
        """Call `listener` with the names that came or left, after each change."""
        self._listeners.append(listener)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether a block is in memory, on disk, or on its way from one to the other."""
        return (
            block_hash in self.pool
            or block_hash in self._leaving
            or (self.disk is not None and block_hash in self.disk)
        )

    @property
    def hashes(self) -> list[BlockHash]:
        """Return everything that is here, in memory or on disk."""
        on_disk = self.disk.hashes if self.disk is not None else []
        return list(dict.fromkeys([*self.pool.hashes, *self._leaving, *on_disk]))

    def match(self, chain: Sequence[BlockHash]) -> Found:
        """Return how much of `chain` is here; nothing is held or counted as used."""
        in_memory = count = self.pool.match(chain)
        while count < len(chain) and chain[count] in self:
            count += 1
        return Found(count, in_memory)

    # --- writing ------------------------------------------------------------------------

    def reserve(self, chain: Sequence[BlockHash], tenant: str) -> OpenPut:
        """Set aside what is missing of `chain`, as far as there is room, for PUT_S.

        Raises:
            CapacityError: too many grants are live. Nothing was taken.
        """
        put = self.pool.reserve(chain, tenant, PUT_S)
        self._publish_evicted()
        if not put.missing:
            self.pool.abort(put.put_id)
            return OpenPut(put.put_id, (), None)
        try:
            offsets = [block_id * self.block_bytes for block_id in put.block_ids]
            grant = self._agent.grant(self.segment, offsets, self.block_bytes, Operation.WRITE, PUT_S)
        except BaseException:
            self.pool.abort(put.put_id)
            raise
        self._put_grants[put.put_id] = grant
        return OpenPut(put.put_id, put.missing, grant)

    async def commit(self, ticket: int, checksums: Sequence[int | None]) -> int:
        """End a put whose bytes have arrived, but of blocks without a checksum; return how many are stored.

        Raises:
            LeaseExpiredError, ProtocolError: as the pool's `commit`.
        """
        grant = self._put_grants.pop(ticket, None)
        if grant is None:
            raise LeaseExpiredError(f"put {ticket} has ended")
        return await uninterrupted(self._commit(ticket, grant, checksums))

    async def abort(self, ticket: int) -> None:
        """End a put that will not be committed. Twice is once."""
        if (grant := self._put_grants.pop(ticket, None)) is not None:
            await uninterrupted(self._end_put(ticket, grant))

    # --- reading ------------------------------------------------------------------------

    async def lease(self, chain: Sequence[BlockHash], first: int) -> Leased:
        """Hold the leading blocks of `chain` that are here, for LEASE_S, and let them be read.

        What is on disk and not in memory after LIFT_S is left out.

        Raises:
            CapacityError: too many grants are live. Nothing is held.
            LeaseExpiredError: the event loop stood still for LEASE_S. Nothing is held.
        """
        found = self.match(chain)
        if found.num_blocks > found.num_in_memory:
            await self._lifted(chain)
        is_long = found.num_blocks > MAX_PUT_BLOCKS
        if is_long:
            await asyncio.sleep(0)
        lease = self.pool.lease(chain, LEASE_S)
        records = lease.records[first:]
        if not records:
            self.pool.end(lease.lease_id)
            return Leased(lease.lease_id, len(lease.records), None, ())
        try:
            if is_long:
                await asyncio.sleep(0)
                self.pool.require_lease(lease.lease_id)
            offsets = [record.block_id * self.block_bytes for record in records]
            grant = self._agent.grant(self.segment, offsets, self.block_bytes, Operation.READ, LEASE_S)
        except BaseException:
            self.pool.end(lease.lease_id)
            raise
        self._lease_grants[lease.lease_id] = grant
        return Leased(lease.lease_id, len(lease.records), grant, lease.checksums[first:])

    async def release(self, ticket: int) -> None:
        """End a lease. Twice is once."""
        await uninterrupted(self._end_lease(ticket))

    # --- forgetting ---------------------------------------------------------------------

    async def delete(self, chain: Sequence[BlockHash]) -> int:
        """Forget `chain` from its tail, as far as nothing needs it; return the blocks gone."""
        await self._lowered(chain)
        gone: list[BlockHash] = []
        # What is left is a whole chain between two parts as well, and the directory says so.
        for end in range(self.pool.match(chain), 0, -MAX_PUT_BLOCKS):
            part = chain[max(end - MAX_PUT_BLOCKS, 0) : end]
            forgotten = self.pool.delete(part)
            self._withdraw(forgotten)
            gone += forgotten
            if part[0] in self.pool:
                break  # something needs it; what is not there any more was evicted, or is on its way to disk
            await asyncio.sleep(0)
        if self.disk is not None:
            await self._lowered(chain)
            for block_hash in reversed(chain):
                if block_hash in self.pool:
                    break
                if block_hash in self.disk and await self.disk.forget(block_hash):
                    gone.append(block_hash)
        self._publish_evicted()
        return len(set(gone))

    async def report(self, block_hash: BlockHash) -> None:
        """Look at a block that a reader found damaged; if it is, forget it and all after it."""
        if block_hash not in self.pool:
            return
        record = self.pool.record(block_hash)
        if is_checksum_of(record.checksum, self._view(record.block_id)):
            return
        self.num_damaged += 1
        gone = self.pool.discard(block_hash)
        self._withdraw(gone)
        if self.disk is not None:
            await self.disk.forget(block_hash)
            self._publish_evicted()
        event(log, "damaged block", level=logging.WARNING, forgotten=len(gone))

    # --- upkeep -------------------------------------------------------------------------

    async def tick(self) -> None:
        """End what ran out, make room, and check the accounts. Called once a second, or when `crowded`.

        What waits for a peer that copies, or for the disk, goes on after `UPKEEP_S`: the rest does not wait.
        """
        self.crowded.clear()
        puts, leases = self.pool.expired()
        for ticket in puts:
            self._begin(ticket, partial(self.abort, ticket))
        for ticket in leases:
            self._begin(ticket, partial(self.release, ticket))
        if self.disk is not None:
            self._begin(_LOWERING, partial(self._lower, self.disk))
        if self._upkeep:
            await asyncio.wait(self._upkeep.values(), timeout=UPKEEP_S)
        for name in [name for name, work in self._upkeep.items() if work.done()]:
            self._upkeep.pop(name).result()
        self._publish_evicted()
        self.pool.forget_idle_tenants()
        self._balance("host", asdict(self.pool.accounts()), self.num_damaged)
        if self.disk is not None:
            self._balance("disk", asdict(self.disk.accounts()), self.disk.damaged)
            if self._metrics is not None:
                self._metrics.disk_growth.labels("growing").set(not self.disk.is_full)
                self._metrics.disk_growth.labels("resting").set(self.disk.is_full)

    async def persist(self) -> None:
        """Write to disk what is in memory alone, heads of chains first, as the process ends."""
        if self.disk is None:
            return
        names = [name for name in self.pool.hashes if name not in self.disk]
        for at in range(0, len(names), LEAVE_BLOCKS):
            async with asyncio.TaskGroup() as tasks:
                for name in names[at : at + LEAVE_BLOCKS]:
                    if name in self.pool:
                        tasks.create_task(self._write_one(self.disk, self.pool.record(name)))

    async def close(self) -> None:
        """End every grant. What the disk holds stays."""
        for ticket in list(self._put_grants):
            await self.abort(ticket)
        for ticket in list(self._lease_grants):
            await self.release(ticket)
        if self._upkeep:
            await asyncio.wait(self._upkeep.values())
        if self._directory is not None:
            await self._directory.leave()

    def check(self) -> None:
        """Assert the accounts of both tiers, and that each grant has its blocks."""
        self.pool.check()
        if self.disk is not None:
            self.disk.check()

    def _balance(self, tier: str, places: dict[str, int], num_damaged: int) -> None:
        """The accounting invariant, in production: every block is in one place."""
        total = places.pop("total")
        if unaccounted := total - sum(places.values()):
            event(log, "blocks are unaccounted for", level=logging.ERROR, tier=tier, total=total, **places)
        if self._metrics is not None:
            for place, count in places.items():
                self._metrics.blocks.labels(tier, place).set(count)
            self._metrics.unaccounted.labels(tier).set(unaccounted)
            self._metrics.damaged.labels(tier).set(num_damaged)

    # --- below --------------------------------------------------------------------------

    def _view(self, block_id: int) -> memoryview:
        return self.segment.memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    async def _commit(self, ticket: int, grant: Grant, checksums: Sequence[int | None]) -> int:
        # No byte may arrive after a block has a name.
        await self._agent.revoke(grant)
        try:
            stored = self.pool.commit(ticket, checksums)
        except BaseException:
            self.pool.abort(ticket)
            raise
        if self._directory is not None:
            self._directory.publish(stored)
        self._notify(stored)
        if self.disk is not None and self.pool.is_crowded:
            self.crowded.set()
        return len(stored)

    async def _end_put(self, ticket: int, grant: Grant) -> None:
        await self._agent.revoke(grant)
        self.pool.abort(ticket)

    async def _end_lease(self, ticket: int) -> None:
        if (grant := self._lease_grants.get(ticket)) is not None:
            await self._agent.revoke(grant)
            self._lease_grants.pop(ticket, None)  # not before: who ends it meanwhile has to wait too
        self.pool.end(ticket)

    async def _lowered(self, chain: Sequence[BlockHash]) -> None:
        """Wait until what is on its way to disk is there."""
        if not self._leaving.isdisjoint(chain):
            async with self._lowering:
                pass

    async def _lifted(self, chain: Sequence[BlockHash]) -> None:
        """Wait until `chain` is in memory, or for LIFT_S; what was begun by then comes all the same."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIFT_S):
                await self._lifting.acquire()
                await asyncio.shield(self._lift_in_turn(chain))

    async def _lift_in_turn(self, chain: Sequence[BlockHash]) -> None:
        try:
            await self._lift(chain)
        finally:
            self._lifting.release()

    async def _lift(self, chain: Sequence[BlockHash]) -> None:
        """Bring the blocks of `chain` that are on disk into memory, as far as there is room."""
        await self._lowered(chain)
        found = self.match(chain)
        if self.disk is None or found.num_blocks == found.num_in_memory:
            return
        # Who paid for blocks that only the disk remembers is not known.
        # It does not run out: no peer writes, the disk does, and it always ends.
        put = self.pool.reserve(chain[: found.num_blocks], "", math.inf)
        try:
            sums = await uninterrupted(self._read_all(self.disk, put.chain, put.missing, put.block_ids))
        except BaseException:
            self.pool.abort(put.put_id)
            raise
        self.pool.commit(put.put_id, sums)
        self._publish_evicted()

    async def _read_all(
        self, disk: DiskTier, chain: Sequence[BlockHash], indexes: Sequence[int], block_ids: Sequence[int]
    ) -> list[int | None]:
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(disk.read(chain[index], self._view(block_id)))
                for index, block_id in zip(indexes, block_ids, strict=True)
            ]
        return [read.result() for read in reads]

    def _begin(self, name: int, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin some upkeep, unless it is under way."""
        if name not in self._upkeep:
            self._upkeep[name] = asyncio.create_task(work())

    async def _lower(self, disk: DiskTier) -> None:
        """Write to disk what memory has too much of, and let go of it there."""
        while True:
            async with self._lowering:
                # Taken in turn: who waited for the blocks before these goes on with none on its way.
                if not (records := self.pool.leave(LEAVE_BLOCKS)):
                    return
                self._leaving.update(record.block_hash for record in records)
                await uninterrupted(self._write_down(disk, records))

    async def _write_down(self, disk: DiskTier, records: Sequence[Record]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for record in records:
                tasks.create_task(self._write_one(disk, record))
        for record in records:
            self._leaving.discard(record.block_hash)
            self.pool.left(record)
        self._withdraw(record.block_hash for record in records)

    async def _write_one(self, disk: DiskTier, record: Record) -> None:
        await disk.write(record.block_hash, self._view(record.block_id), record.checksum)

    def _publish_evicted(self) -> None:
        gone = self.pool.evicted
        self.pool.evicted = []
        if self.disk is not None:
            gone += self.disk.evicted
            self.disk.evicted = []
        self._withdraw(gone)

    def _withdraw(self, hashes: Iterable[BlockHash]) -> None:
        gone = [block_hash for block_hash in hashes if block_hash not in self]
        if self._directory is not None:
            self._directory.withdraw(gone)
        self._notify(gone)

    def _notify(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            for listener in self._listeners:
                listener(hashes)
