"""Host memory as a pool of equal blocks: who may touch which bytes, and until when.

Pure: no I/O; the clock is handed in. Every block of memory is in exactly one place:

    free        no content                              -> the next put takes it
    in transfer bytes are on their way in (put), or on their way down to disk (leaving)
    cached      content named by a hash, nobody reads it -> may be evicted, leaves first
    held        content named by a hash, leased -> is not touched

`check()` asserts this partition; `accounts()` is the same as four numbers.

A put has two phases. `reserve` sets blocks aside for what is missing of a chain, the
bytes arrive, `commit` names them with their checksums. Nothing uncommitted is ever found.
A block that is here, or on its way in, is not reserved again: it costs no bytes.

Leases and puts run out by our clock, but the pool frees nothing by itself: `expired` says
what is due, and whoever let a peer touch the bytes revokes that first, then calls `end`.

Tenants have chains of their own, because a tenant's salt is in the root of its hashes. So
each tenant has its own tree of blocks, a tenant at its quota evicts its own blocks, and
room for others is taken from the tenant that fills most of its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import CapacityError, LeaseExpiredError, ProtocolError
from kvstore.eviction import Eviction


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """When a pool makes room, and for whom."""

    high_watermark: float = 0.95
    """Share of blocks in use; above it, `leave` makes room before a put has to."""
    low_watermark: float = 0.90
    tenant_quota: float = 1.0
    """Share of all blocks that each tenant may fill."""


@dataclass(slots=True)
class Record:
    """A committed block. Only the pool changes it."""

    block_hash: BlockHash
    block_id: int
    checksum: int
    tenant: str
    holders: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Blocks set aside for a chain; `missing` are indexes in it, in order."""

    put_id: int
    chain: tuple[BlockHash, ...]
    missing: tuple[int, ...]
    block_ids: tuple[int, ...]
    tenant: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise not to evict a chain's leading blocks before a moment, or until `end`."""

    lease_id: int
    records: tuple[Record, ...]
    expires_at_s: float

    @property
    def checksums(self) -> tuple[int, ...]:
        return tuple(record.checksum for record in self.records)


@dataclass(frozen=True, slots=True)
class Accounts:
    """How many blocks are in each place; the first four add up to `total`."""

    free: int
    in_transfer: int
    cached: int
    held: int
    total: int


@dataclass(slots=True)
class _Tenant:
    tree: Eviction[BlockHash]
    num_blocks: int = 0
    """Committed and reserved ones."""


class HostPool:
    """Owns the block ids of one host's memory. Belongs to the event loop."""

    def __init__(
        self,
        num_blocks: int,
        make_eviction: Callable[[], Eviction[BlockHash]],
        clock: Clock,
        limits: PoolLimits | None = None,
        last_id: int = 0,
    ) -> None:
        """Begin. Ids of puts and leases follow `last_id`, drawn at each start so that none comes twice."""
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._limits = limits or PoolLimits()
        self._clock = clock
        self._make_eviction = make_eviction
        self._free = list(range(num_blocks))[::-1]
        self._records: dict[BlockHash, Record] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._last_id = last_id
        self._puts: dict[int, Put] = {}
        self._leases: dict[int, Lease] = {}
        self._arriving: set[BlockHash] = set()
        self._leaving: dict[int, Record] = {}
        """Blocks on their way down to disk, by their ids."""
        self._num_held = 0
        self.evicted: list[BlockHash] = []
        """Names forgotten to make room since the owner last emptied this list."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._records

    @property
    def hashes(self) -> list[BlockHash]:
        """Return what is committed, parents before children."""
        return list(self._records)

    def match(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `chain` are committed."""
        return len(list(takewhile(self._records.__contains__, chain)))

    def record(self, block_hash: BlockHash) -> Record:
        """Return a committed block."""
        return self._records[block_hash]

    # --- writing ------------------------------------------------------------------------

    def reserve(self, chain: Sequence[BlockHash], tenant: str, lease_s: float) -> Put:
        """Set blocks aside for what is missing of `chain`, as far as there is room.

        What does not fit is left out from the tail, because a tail without its head is
        useless. An empty `missing` means there is nothing to write.
        """
        payer = self._payer(chain, tenant)
        matched = self.match(chain)
        account = self._account(payer)
        account.tree.touch(chain[:matched])
        hold = chain[matched - 1] if matched else None
        if hold is not None:
            account.tree.hold(hold)
        own, others = self._victims([account]), self._victims(self._tenants.values())
        missing: list[int] = []
        block_ids: list[int] = []
        try:
            for index in range(matched, len(chain)):
                if chain[index] not in self._arriving:
                    block_ids.append(self._take(account, own, others))
                    missing.append(index)
        except CapacityError:
            pass  # the head that fits is worth having
        finally:
            if hold is not None:
                account.tree.release(hold)
        put = Put(
            self._draw(),
            tuple(chain),
            tuple(missing),
            tuple(block_ids),
            payer,
            self._clock.now_s() + lease_s,
        )
        self._puts[put.put_id] = put
        self._arriving.update(chain[index] for index in missing)
        return put

    def commit(self, put_id: int, checksums: Sequence[int | None]) -> list[BlockHash]:
        """Name a put's blocks, whose bytes have arrived; return the names stored.

        A None among the checksums is a block whose bytes did not come. It is not stored,
        nor is a block whose parent is not there: nobody could find it.

        Raises:
            LeaseExpiredError: no such put: it ended, or ran out.
            ProtocolError: not one checksum for each block. The put stays.
        """
        put = self._require_put(put_id)
        if len(checksums) != len(put.missing):
            raise ProtocolError(f"{len(checksums)} checksums for {len(put.missing)} blocks")
        self._forget_put(put)
        account = self._account(put.tenant)
        stored = []
        for index, block_id, checksum in zip(put.missing, put.block_ids, checksums, strict=True):
            block_hash, parent = put.chain[index], put.chain[index - 1] if index else None
            if checksum is None or (parent is not None and parent not in account.tree):
                self._give_back(put.tenant, block_id)
                continue
            account.tree.insert(block_hash, parent)
            self._records[block_hash] = Record(block_hash, block_id, checksum, put.tenant)
            stored.append(block_hash)
        return stored

    def abort(self, put_id: int) -> None:
        """End a put that will not be committed; its blocks are free. Twice is once."""
        if (put := self._puts.get(put_id)) is not None:
            self._forget_put(put)
            for block_id in put.block_ids:
                self._give_back(put.tenant, block_id)

    # --- reading ------------------------------------------------------------------------

    def lease(self, chain: Sequence[BlockHash], lease_s: float) -> Lease:
        """Hold the leading blocks of `chain` that are here, for `lease_s` at most.

        A lease of nothing is empty.
        """
        found = chain[: self.match(chain)]
        records = tuple(map(self._records.__getitem__, found))
        if records:
            tree = self._tenants[records[0].tenant].tree
            tree.touch(found)
            tree.hold(found[-1])
        for record in records:
            if not record.holders:
                self._num_held += 1
            record.holders += 1
        lease = Lease(self._draw(), records, self._clock.now_s() + lease_s)
        self._leases[lease.lease_id] = lease
        return lease

    def require_lease(self, lease_id: int) -> None:
        """Raises LeaseExpiredError if a lease has ended: what it held may be somebody else's."""
        if lease_id not in self._leases:
            raise LeaseExpiredError(f"lease {lease_id} has ended")

    def end(self, lease_id: int) -> None:
        """End a lease. Twice is once."""
        lease = self._leases.pop(lease_id, None)
        if lease is None or not lease.records:
            return
        for record in lease.records:
            record.holders -= 1
            self._num_held -= record.holders == 0
        last = lease.records[-1]
        self._tenants[last.tenant].tree.release(last.block_hash)

    def expired(self) -> tuple[list[int], list[int]]:
        """Return the ids of (puts, leases) that ran out. They hold until ended."""
        now_s = self._clock.now_s()
        puts = [put.put_id for put in self._puts.values() if put.expires_at_s <= now_s]
        leases = [lease.lease_id for lease in self._leases.values() if lease.expires_at_s <= now_s]
        return puts, leases

    # --- making room --------------------------------------------------------------------

    def delete(self, chain: Sequence[BlockHash]) -> list[BlockHash]:
        """Forget `chain`, or an end of one, from its tail, as far as nothing else needs it; return the names.

        A block that is held, or that another chain goes through, ends the walk.
        """
        gone: list[BlockHash] = []
        for block_hash in reversed(chain[: self.match(chain)]):
            record = self._records[block_hash]
            if not self._tenants[record.tenant].tree.is_leaf(block_hash):
                break
            self._remove(record)
            gone.append(block_hash)
        return gone

    def discard(self, block_hash: BlockHash) -> list[BlockHash]:
        """Forget a damaged block and all after it, deepest first; return the names.

        What is held stays, with all before it: try again when it is not.
        """
        gone: list[BlockHash] = []
        record = self._records.get(block_hash)
        if record is not None:
            tree = self._tenants[record.tenant].tree
            for name in tree.subtree(block_hash):
                if tree.is_leaf(name):
                    self._remove(self._records[name])
                    gone.append(name)
        return gone

    @property
    def is_crowded(self) -> bool:
        """Whether more than the high watermark is in use."""
        return self._num_in_use > self._limits.high_watermark * self.num_blocks

    def leave(self, most: int) -> list[Record]:
        """Take up to `most` blocks out, if the pool is above its high watermark, until the low one.

        They are found no more; their bytes stay until `left`, so that they can be written
        to disk first.
        """
        if not self.is_crowded:
            return []
        surplus = self._num_in_use - int(self._limits.low_watermark * self.num_blocks)
        records = list(islice(self._victims(self._tenants.values()), min(most, surplus)))
        self._leaving.update((record.block_id, record) for record in records)
        return records

    def left(self, record: Record) -> None:
        """Free the bytes of a block that `leave` took out. Twice is once."""
        if self._leaving.pop(record.block_id, None) is not None:
            self._give_back(record.tenant, record.block_id)

    def forget_idle_tenants(self) -> None:
        """Drop the books of tenants that have nothing here: there is no end of tenants."""
        for tenant in [name for name, account in self._tenants.items() if not account.num_blocks]:
            del self._tenants[tenant]

    # --- accounting ---------------------------------------------------------------------

    def accounts(self) -> Accounts:
        """Return where all blocks are."""
        return Accounts(
            free=len(self._free),
            in_transfer=len(self._arriving) + len(self._leaving),
            cached=len(self._records) - self._num_held,
            held=self._num_held,
            total=self.num_blocks,
        )

    def check(self) -> None:
        """Assert the partition of the docstring, and that each hold has an owner."""
        places = list(self._free) + [record.block_id for record in self._records.values()]
        for put in self._puts.values():
            places += put.block_ids
        places += self._leaving
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        books = self.accounts()
        assert books.free + books.in_transfer + books.cached + books.held == books.total
        holders = dict.fromkeys(self._records, 0)
        for lease in self._leases.values():
            for record in lease.records:
                assert self._records[record.block_hash] is record, "a held block was evicted"
                holders[record.block_hash] += 1
        assert all(record.holders == holders[name] for name, record in self._records.items())
        for account in self._tenants.values():
            account.tree.check()
        assert sum(account.num_blocks for account in self._tenants.values()) == len(places) - len(self._free)

    # --- below --------------------------------------------------------------------------

    @property
    def _num_in_use(self) -> int:
        """Blocks with content that is to stay, or coming in."""
        return self.num_blocks - len(self._free) - len(self._leaving)

    def _draw(self) -> int:
        self._last_id += 1
        return self._last_id

    def _payer(self, chain: Sequence[BlockHash], tenant: str) -> str:
        """A chain has one payer, whoever put its first block: its tree must be whole."""
        first = self._records.get(chain[0]) if chain else None
        return first.tenant if first is not None else tenant

    def _account(self, tenant: str) -> _Tenant:
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant(self._make_eviction())
        return self._tenants[tenant]

    def _take(self, account: _Tenant, own: Iterator[Record], others: Iterator[Record]) -> int:
        is_at_quota = account.num_blocks >= self._limits.tenant_quota * self.num_blocks
        if is_at_quota or not self._free:
            record = next(own if is_at_quota else others, None)
            if record is None:
                raise CapacityError("every block is held or on its way")
            self._give_back(record.tenant, record.block_id)
        account.num_blocks += 1
        return self._free.pop()

    def _victims(self, accounts: Iterable[_Tenant]) -> Iterator[Record]:
        """Forget blocks one by one, of the account that has most by then, until all that is left is held."""
        # Numbered, so that of those that have as much the first goes first.
        fullest = [(-len(account.tree), number, account) for number, account in enumerate(accounts)]
        heapq.heapify(fullest)
        while fullest:
            _, number, account = fullest[0]
            try:
                record = self._records.pop(account.tree.victim())
            except CapacityError:
                heapq.heappop(fullest)
                continue
            heapq.heapreplace(fullest, (-len(account.tree), number, account))
            self.evicted.append(record.block_hash)
            yield record

    def _remove(self, record: Record) -> None:
        self._tenants[record.tenant].tree.remove(record.block_hash)
        del self._records[record.block_hash]
        self._give_back(record.tenant, record.block_id)

    def _give_back(self, tenant: str, block_id: int) -> None:
        self._free.append(block_id)
        self._tenants[tenant].num_blocks -= 1

    def _require_put(self, put_id: int) -> Put:
        put = self._puts.get(put_id)
        if put is None or put.expires_at_s <= self._clock.now_s():
            raise LeaseExpiredError(f"put {put_id} has ended")
        return put

    def _forget_put(self, put: Put) -> None:
        del self._puts[put.put_id]
        for index in put.missing:
            self._arriving.remove(put.chain[index])
