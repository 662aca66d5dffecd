"""The block cache as its users see it: match, load and save chains, wherever blocks are.

    num_here = await cache.match(chain)
    num_loaded = await cache.load(chain, segment, offsets, sums=sums)      # into the caller's memory
    num_stored = await cache.save(chain, segment, offsets, checksums)

Losing KV is never an error. `load` goes from holder to holder: one that is gone, has
forgotten a block or twice sends bytes that are not those of their checksum is left for the
next; when no holder is left, fewer blocks are loaded, and the caller computes the others.
A `save` that cannot is the same: fewer blocks are stored.

Bytes move between segments by the transfer agent, straight from and into the caller's.
Checksums are compared here, where the bytes are used first, group by group while the next
group is on its way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import CapacityError, ProtocolError, ServeError
from base.grants import Grant
from base.together import together
from base.uninterrupted import uninterrupted
from kvstore.access import LocalAccess, RemoteAccess, StoreAccess, note_failure, resting_peers
from kvstore.directory import Directory, Replicas
from kvstore.store import MAX_PUT_BLOCKS, Leased, OpenPut, Store
from kvstore.wire import Member
from transfer.agent import TransferAgent
from transfer.batch import Priority, pieces_of
from transfer.owned.segment import Segment

GROUP_BYTES = 128 << 20
"""Bytes moved while the group before it is compared with its checksums. A device sums 40 GB/s, and 34 in
groups of 32 MiB (one H200, 2026-11-21)."""
GROUPS_UNDER_WAY = 3
"""One alone leaves the link idle while it is planned and reported: 21 GB/s of 55 (one H200, 2026-11-21)."""
Sums = Callable[[Sequence[int]], Awaitable[Sequence[int]]]
"""Returns the checksums of the blocks that lie at these offsets."""

STRIPES_UNDER_WAY = 2
"""Stripes that are read at once; they are waited for in their order."""

MAX_TRIES = 2
"""Tries of one member within one load: bytes may be damaged on their way."""


@dataclass(frozen=True, slots=True)
class Stripes:
    """Loading of parts of all blocks, one part of each after the other: a block's layers in turn.

    A stripe that was reported is there, and may be read; whether it is right is known at the end.
    """

    shares: tuple[int, ...]
    """Sizes of a block's parts, in proportion. If their sum does not divide its bytes, whole blocks are
    loaded, and `on_arrived` is not called."""
    on_arrived: Callable[[int], None]
    """Called with the number of leading stripes that are there, unless blocks come from several places."""


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where loaded blocks go, and how they are looked at there."""

    into: Segment
    sums: Sums
    stripes: Stripes | None = None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks to be stored, from the one of index `first` in their chain on."""

    source: Segment
    offsets: Sequence[int]
    checksums: Sequence[int]
    first: int


class BlockCache:
    """One process's way into the cluster's cache. Belongs to the event loop."""

    def __init__(
        self,
        agent: TransferAgent,
        directory: Directory,
        clock: Clock,
        own: tuple[Member, Store] | None = None,
        reach: Callable[[str], StoreAccess] = RemoteAccess,
        block_bytes: int = 0,
    ) -> None:
        """Begin. `own` is this process's store, where it saves and looks first; None: it has none.

        `reach` makes the access to the member at an address. Blocks of other than `block_bytes` are neither
        loaded nor saved; 0: of any length, for memory in which nothing lies beside them.
        """
        self._block_bytes = block_bytes
        self._agent = agent
        self.directory = directory
        self._own = None if own is None else own[0]
        self._reach = reach
        self._accesses: dict[str, StoreAccess] = {}
        if own is not None:
            self._accesses[own[0].address] = LocalAccess(own[1])
        self._resting = resting_peers(clock)
        self.num_damaged = 0
        """Blocks that arrived with other bytes than were stored."""

    async def match(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `chain` some live member is said to hold."""
        return len(await self.directory.lookup(chain))

    async def num_saved(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are in our own store; without one, in any."""
        if self._own is None:
            return await self.match(chain)
        return (await (await self._access(self._own)).match(chain)).num_blocks

    async def load(
        self,
        chain: Sequence[BlockHash],
        into: Segment,
        offsets: Sequence[int],
        first: int = 0,
        *,
        sums: Sums,
        stripes: Stripes | None = None,
    ) -> int:
        """Load blocks `first`, `first + 1`, ... of `chain` to `offsets` of `into`.

        `sums` takes the checksums of what came. With `stripes`, what comes wrong is not tried again.

        Returns how many came, from `first` on; their bytes are right. What lies at the
        other offsets is undefined.
        """
        end = min(first + len(offsets), len(chain))
        replicas = await self.directory.lookup(chain[:end])
        landing = _Landing(into, sums)
        tries: Counter[int] = Counter()
        at = first
        while at < len(replicas):
            member = self._choose(replicas, at, tries)
            if member is None:
                break
            run_end = _run_end(replicas, at, member)
            wanted = offsets[at - first : run_end - first]
            if stripes is not None and (at, run_end) == (first, len(replicas)):
                striped = replace(landing, stripes=stripes)
                return await self._load_from(member, chain[:run_end], at, striped, wanted)
            num_loaded = await self._load_from(member, chain[:run_end], at, landing, wanted)
            tries[member.epoch] += num_loaded < run_end - at
            at += num_loaded
        return max(at - first, 0)

    async def save(
        self,
        chain: Sequence[BlockHash],
        source: Segment,
        offsets: Sequence[int],
        checksums: Sequence[int],
        first: int = 0,
        tenant: str = "",
        priority: Priority = Priority.FOREGROUND,
    ) -> int:
        """Store blocks `first`, `first + 1`, ... of `chain`, which lie at `offsets` of `source`.

        They go to our own member, else to the one that holds most of the chain. What is there
        already moves no bytes. A member stores whole chains only: where it lacks a block before
        `first`, it stores nothing.

        Args:
            chain: From the prompt's first block to the last one given.
            source: Not changed until this returns.
            offsets: One for each block from `first` on.
            checksums: Made where the KV was made; one for each offset.
            first: Index in `chain` of the first block given.
            tenant: Who pays, where there are quotas.
            priority: Who goes first on a link.

        Returns how many blocks were newly stored.
        """
        member = await self._home(chain)
        if member is None:
            return 0
        num_stored = 0
        for at in range(0, len(offsets), MAX_PUT_BLOCKS):
            end = min(at + MAX_PUT_BLOCKS, len(offsets))
            blocks = _Blocks(source, offsets[at:end], checksums[at:end], first + at)
            stored = await self._put(member, chain[: first + end], blocks, tenant, priority)
            if stored is None:
                break  # what follows would have no head there
            num_stored += stored
        return num_stored

    async def delete(self, chain: Sequence[BlockHash]) -> int:
        """Forget `chain` wherever it is, as far as nothing else needs it; return replicas gone."""
        replicas = await self.directory.lookup(chain)
        holders = {member.epoch: member for members in replicas for member in members}
        gone = 0
        for member in holders.values():
            try:
                gone += await (await self._access(member)).delete(chain)
            except ServeError as error:
                note_failure(self._resting, member.epoch, error)
        return gone

    async def close(self) -> None:
        """Close the connections to other members."""
        for access in self._accesses.values():
            await access.close()

    # --- whom to ask --------------------------------------------------------------------

    def _choose(self, replicas: Sequence[Replicas], at: int, tries: Counter[int]) -> Member | None:
        """Return the holder of block `at` to ask: our own, else who holds the longest run on."""
        able = [
            member
            for member in replicas[at]
            if tries[member.epoch] < MAX_TRIES and member.epoch not in self._resting
        ]
        return max(
            able,
            key=lambda member: (
                self._own is not None and member.epoch == self._own.epoch,
                _run_end(replicas, at, member),
                self._own is not None and member.host == self._own.host,
            ),
            default=None,
        )

    async def _home(self, chain: Sequence[BlockHash]) -> Member | None:
        if self._own is not None:
            return self._own
        replicas = await self.directory.lookup(chain)
        known = replicas[0] if replicas else await self.directory.members()
        # Where the chain is new, its last block's hash spreads chains over the members.
        spread = int.from_bytes(chain[-1][:8], "little")
        return max(
            (member for member in known if member.epoch not in self._resting),
            key=lambda member: (
                _run_end(replicas, 0, member),
                (spread ^ member.epoch) * 0x9E3779B1 % (1 << 32),
            ),
            default=None,
        )

    async def _access(self, member: Member) -> StoreAccess:
        # By address: a member that restarts where it was needs no second connection.
        if member.address not in self._accesses:
            living = {each.address for each in (*await self.directory.members(), self._own) if each}
            for gone in self._accesses.keys() - living:
                # Its connection closes with the last call that goes by it.
                del self._accesses[gone]
        if member.address not in self._accesses:
            self._accesses[member.address] = self._reach(member.address)
        return self._accesses[member.address]

    async def _quietly(self, call: Awaitable[None]) -> None:
        """Give something back; where that fails, it ends by its lease."""
        with suppress(ServeError):
            await call

    # --- moving -------------------------------------------------------------------------

    async def _load_from(
        self,
        member: Member,
        chain: Sequence[BlockHash],
        first: int,
        landing: _Landing,
        offsets: Sequence[int],
    ) -> int:
        """Return how many blocks from `first` on came from this member, and are right."""
        try:
            access = await self._access(member)
            leased = await access.lease(chain, first)
        except ServeError as error:
            note_failure(self._resting, member.epoch, error)
            return 0
        if leased.grant is None:
            return 0
        try:
            num_right = await self._read(member, leased, landing, offsets)
            self._resting.succeeded(member.epoch)
        except ServeError as error:
            note_failure(self._resting, member.epoch, error)
            return 0
        finally:
            await uninterrupted(self._quietly(access.release(leased.ticket)))
        if num_right < len(leased.checksums):
            self.num_damaged += 1
            await self._quietly(access.report(chain[first + num_right]))
        return num_right

    async def _read(self, member: Member, leased: Leased, landing: _Landing, offsets: Sequence[int]) -> int:
        """Return how many leading blocks of the lease are right, all having come."""
        grant = leased.grant
        if grant is None or not len(leased.checksums) == len(grant.offsets) <= len(offsets):
            raise ProtocolError("a lease has an offset and a checksum for each block asked for")
        self._require_whole(grant)
        offsets = offsets[: len(grant.offsets)]
        group = max(1, GROUP_BYTES // grant.length)
        permits = asyncio.Semaphore(GROUPS_UNDER_WAY)

        async def num_right(at: int) -> int:
            here = offsets[at : at + group]
            pieces = pieces_of(landing.into, here, grant.offsets[at : at + group], grant.length)
            async with permits:
                await self._agent.read(member.peer, grant, pieces)
            return num_equal(await landing.sums(here), leased.checksums[at : at + group])

        if landing.stripes is not None and grant.length % sum(landing.stripes.shares) == 0:
            await self._read_stripes(member, grant, landing, landing.stripes, offsets)
            return num_equal(await landing.sums(offsets), leased.checksums)
        counts = await together(num_right(at) for at in range(0, len(grant.offsets), group))
        first_short = next((index for index, count in enumerate(counts) if count < group), len(counts) - 1)
        return sum(counts[: first_short + 1])

    async def _read_stripes(
        self, member: Member, grant: Grant, landing: _Landing, stripes: Stripes, offsets: Sequence[int]
    ) -> None:
        unit = grant.length // sum(stripes.shares)
        sources, targets = np.array(grant.offsets, np.int64), np.array(offsets, np.int64)
        permits = asyncio.Semaphore(STRIPES_UNDER_WAY)

        begins = list(accumulate(stripes.shares, initial=0))
        has_arrived, num_reported = [False] * len(stripes.shares), 0

        async def read(number: int) -> None:
            nonlocal num_reported
            at, size = unit * begins[number], unit * stripes.shares[number]
            async with permits:
                pieces = pieces_of(landing.into, targets + at, sources + at, size)
                await self._agent.read(member.peer, grant, pieces)
            has_arrived[number] = True
            while num_reported < len(has_arrived) and has_arrived[num_reported]:
                num_reported += 1
                stripes.on_arrived(num_reported)

        await together(read(number) for number in range(len(stripes.shares)))

    async def _put(
        self, member: Member, chain: Sequence[BlockHash], blocks: _Blocks, tenant: str, priority: Priority
    ) -> int | None:
        """Store the last blocks of `chain`; return how many are stored, or None where that failed."""
        try:
            access = await self._access(member)
            reserved = await access.reserve(chain, tenant)
        except CapacityError:
            return None
        except ServeError as error:
            note_failure(self._resting, member.epoch, error)
            return None
        if reserved.grant is None or not reserved.missing:
            return 0
        if min(reserved.missing) < blocks.first:
            await self._quietly(access.abort(reserved.ticket))
            return None
        try:
            await self._write(member, reserved, blocks, priority)
            sums = [blocks.checksums[index - blocks.first] for index in reserved.missing]
            return await access.commit(reserved.ticket, sums)
        except ServeError as error:
            note_failure(self._resting, member.epoch, error)
            await self._quietly(access.abort(reserved.ticket))
            return None
        except asyncio.CancelledError:
            await uninterrupted(self._quietly(access.abort(reserved.ticket)))
            raise

    async def _write(self, member: Member, reserved: OpenPut, blocks: _Blocks, priority: Priority) -> None:
        grant, missing, first = reserved.grant, reserved.missing, blocks.first
        if grant is None or len(missing) != len(grant.offsets) or max(missing) >= first + len(blocks.offsets):
            raise ProtocolError("a reservation has an offset for each block that is missing")
        self._require_whole(grant)
        wanted = [blocks.offsets[index - first] for index in missing]
        pieces = pieces_of(blocks.source, wanted, grant.offsets, grant.length)
        await self._agent.write(member.peer, grant, pieces, priority=priority)

    def _require_whole(self, grant: Grant) -> None:
        """Raise ProtocolError unless a grant is of blocks: longer ranges reach what lies beside ours."""
        if grant.length < 1 or self._block_bytes not in (0, grant.length):
            raise ProtocolError(f"a block has {self._block_bytes} bytes, not {grant.length}")


def _run_end(replicas: Sequence[Replicas], first: int, member: Member) -> int:
    """Return the index after the last block of the run from `first` on that `member` holds."""
    end = first
    while end < len(replicas) and member in replicas[end]:
        end += 1
    return end


def num_equal(found: Sequence[object], expected: Sequence[object]) -> int:
    """Return how many leading ones, of blocks or their sums, are what they should be."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((count for count, (one, other) in pairs if one != other), len(expected))
