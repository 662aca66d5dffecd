"""Hot blocks get replicas on other hosts, and get them back when a node goes.

The number of replicas follows heat: 2 from `HOT` reads on, one more for each doubling. Of
a block's holders the one with the lowest epoch copies; so a block is copied once, and when
that holder goes the next one sees a replica too few in the directory and copies again.
Nothing is ever taken away: a replica that is not read is evicted like any other block.

`wanted` decides, purely; `Replicator` copies, in the background class of the transfer
agent, within the bytes it is given for a round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from base.block_hash import BlockHash
from base.errors import ServeError
from base.logs import event
from kvstore.client import BlockCache
from kvstore.heat import Heat
from kvstore.member import Member
from kvstore.store import Store
from transfer.batch import Priority

log = logging.getLogger(__name__)

HOT = 4.0
"""Reads, the last round's whole, the one before it half, and so on."""
MAX_REPLICAS = 8
"""The paper's hottest blocks reach every one of its eight prefill nodes."""


def num_replicas(score: float) -> int:
    """Return how many replicas a block of this score should have."""
    if score < HOT:
        return 1
    return min(MAX_REPLICAS, 2 + int(math.log2(score / HOT)))


def target_or_none(
    block_hash: BlockHash, score: float, own: Member, holders: Sequence[Member], members: Sequence[Member]
) -> Member | None:
    """Return the member that should get a replica from us; None: no copy is ours to make.

    A member on a host that has no replica is preferred; among equals the choice is spread
    by the block's hash, and the same wherever it is made.
    """
    if len(holders) >= num_replicas(score) or own != min(
        holders, key=lambda member: member.epoch, default=own
    ):
        return None
    others = [member for member in members if member not in holders and member != own]
    hosts = {holder.host for holder in holders} | {own.host}
    spread = int.from_bytes(block_hash[:8], "little")
    return max(
        others,
        key=lambda member: (member.host not in hosts, (spread ^ member.epoch) * 0x9E3779B1 % (1 << 32)),
        default=None,
    )


def tails(blocks: Iterable[BlockHash], paths: dict[BlockHash, list[BlockHash]]) -> list[BlockHash]:
    """Return those of `blocks` that stand in no other's path: each ends a chain to copy."""
    inner = {name for path in paths.values() for name in path[:-1]}
    return [name for name in blocks if name in paths and name not in inner]


class Replicator:
    """Copies one store's hot blocks. Belongs to the event loop."""

    def __init__(self, store: Store, cache: BlockCache, own: Member) -> None:
        self._store = store
        self._cache = cache
        self._own = own
        self.num_copied = 0
        """Blocks that other members stored."""

    async def round(self, budget_bytes: int) -> int:
        """Copy what is hot and has too few replicas; let heat fade. Returns bytes copied."""
        most = left = budget_bytes // self._store.block_bytes
        chains = self._chains(self._store.heat) if most else []
        members = await self._cache.directory.members() if chains else []
        for chain, score in chains:
            if left <= 0:
                break
            try:
                left -= await self._copy(chain, score, members, left)
            except ServeError as error:
                event(log, "not replicated", level=logging.WARNING, blocks=len(chain), error=error)
        self._store.heat.fade()
        return (most - left) * self._store.block_bytes

    def _chains(self, heat: Heat) -> list[tuple[list[BlockHash], float]]:
        """Return hot chains with the score of their tails, the hottest first.

        Each count of replicas has its own chains: a shared head is hotter than its tails.
        """
        chains: dict[BlockHash, tuple[list[BlockHash], float]] = {}
        bound = HOT * 2.0 ** (MAX_REPLICAS - 2)
        while bound >= HOT:
            hot = [name for name in heat.above(bound) if name in self._store.pool]
            paths = {name: self._store.pool.path(name) for name in hot}
            for name in tails(hot, paths):
                chains.setdefault(name, (paths[name], heat.of(name)))
            bound /= 2
        return list(chains.values())

    async def _copy(self, chain: list[BlockHash], score: float, members: Sequence[Member], most: int) -> int:
        """Return how many blocks a new replica took."""
        replicas = await self._cache.directory.lookup(chain)
        holders = replicas[-1] if len(replicas) == len(chain) else (self._own,)
        target = target_or_none(chain[-1], score, self._own, holders, members)
        if target is None:
            return 0
        already = sum(target in holders_of for holders_of in replicas)
        part = chain[: already + most]
        leased = await self._store.lease(part, 0)
        try:
            if leased.grant is None:
                return 0
            num_copied = await self._cache.save(
                part[: leased.num_blocks],
                self._store.segment,
                leased.grant.offsets,
                leased.checksums,
                to=target,
                priority=Priority.BACKGROUND,
            )
        finally:
            await self._store.release(leased.ticket)
        self.num_copied += num_copied
        event(log, "replicated", to=target.node_id, blocks=num_copied, heat=score)
        return num_copied
