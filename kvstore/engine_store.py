"""The block cache beside an engine: saves what the engine's cache holds, loads what it lacks.

Saving goes on behind the requests. When a sequence has ended, in either role, its chain is
offered; one task works the offers off, a group of blocks at a time, in the background class
of the transfer agent and within a bandwidth. A block is held for the length of one copy. An
offer that waits too long is dropped, and so is what the engine's cache has forgotten by then,
or what nobody takes: it is a cache.

Loading goes before the computing of a prompt, from wherever the block cache has the blocks, if that has
been the quicker way on this node. The conductor predicts for the whole cluster from a profile; a node knows
better what its own memory, disk and device take, and decides last (`LoadCosts`).

How blocks come and go is a mover's (`block_mover.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from base.block_hash import BlockHash
from base.clock import Clock
from base.errors import ServeError
from base.kv_layout import KvLayout
from base.logs import event
from kvstore.block_mover import BlockMover
from kvstore.client import Stripes
from kvstore.store import MAX_PUT_BLOCKS, Store

log = logging.getLogger(__name__)

MAX_OFFERS = 1024
GROUP_S = 0.1
"""A group is what the bandwidth carries in this time, or one block; and no more than a put has."""

GAIN = 0.2
"""Weight of the newest measurement."""
FADE = 0.98
"""Share of a cost that is left each time it decided against loading: half after 35 times."""
UNTRIED = (0.0, 0.0)


class LoadCosts:
    """Whether loading is sooner done than computing, learned from both on this node. Pure.

    Seconds per token of computing are a mean, the newest counting most. Of loads from each place the better
    of the last two counts, because one that took long may have met a process that stood still. So what was
    tried less than twice is tried; what was passed over fades until it is tried again, and no disk is avoided
    for ever.
    """

    def __init__(self, block_tokens: int) -> None:
        """Begin. `block_tokens`: in one block."""
        self._block_tokens = block_tokens
        self._compute_s = 0.0
        """Seconds to compute a token; 0: unknown."""
        self._load_s: dict[str, tuple[float, float]] = {}
        """Seconds to load a block, by the place where it lies: the last two, newest last; 0: not tried."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prefill of `num_tokens` tokens that were not in the cache."""
        if num_tokens > 0:
            newest_s, mean_s = seconds / num_tokens, self._compute_s
            self._compute_s = mean_s + GAIN * (newest_s - mean_s) if mean_s else newest_s

    def loaded(self, place: str, num_blocks: int, seconds: float) -> None:
        """Learn from a load; one that brought nothing cost its seconds all the same, and was not quick."""
        if not num_blocks:
            self.ended_early(place, 1, seconds)
            return
        _, before_s = self._load_s.get(place, UNTRIED)
        self._load_s[place] = before_s, seconds / num_blocks

    def ended_early(self, place: str, num_blocks: int, seconds: float) -> None:
        """Learn from a load of `num_blocks` that failed or was cancelled: none came sooner than its share."""
        _, before_s = self._load_s.get(place, UNTRIED)
        self._load_s[place] = before_s, max(seconds / max(1, num_blocks), before_s)

    def is_worth(self, place: str) -> bool:
        """Return whether blocks should be loaded from `place` rather than computed."""
        before_s, newest_s = self._load_s.get(place, UNTRIED)
        if not self._compute_s or min(before_s, newest_s) < self._compute_s * self._block_tokens:
            return True
        self._load_s[place] = before_s * FADE, newest_s * FADE
        return False


class EngineBlocks(Protocol):
    """An engine's cache as it is seen from here: `engine/block_pool.py`."""

    def match(self, chain: Sequence[BlockHash]) -> list[int]:
        """Hold the leading blocks of `chain` that are there, until `release`; return their ids."""
        ...

    def release(self, block_ids: Sequence[int], evict_first: bool | None = False) -> None:
        """Give them back; with None when they are evicted is as it was."""
        ...


class EngineStore:
    """One node's engine and its way into the block cache. `run` must be running."""

    def __init__(
        self,
        engine: EngineBlocks,
        layout: KvLayout,
        mover: BlockMover,
        own: Store | None,
        bytes_per_s: float,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        has_quotas: bool = False,
    ) -> None:
        """Begin. `own` is this process's store; None: blocks are saved to others.

        `layout` is of whole blocks. `pause` waits so many seconds, which is what keeps saving within
        `bytes_per_s`. With quotas a tenant pays for its blocks; without, tenants are not kept apart, and
        eviction learns from all of them together.
        """
        self._engine = engine
        self._block_bytes = layout.block_bytes
        self._mover = mover
        self.own = own
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._pause = pause
        self._has_quotas = has_quotas
        self._costs = LoadCosts(layout.block_size)
        self._offers: OrderedDict[BlockHash, tuple[tuple[BlockHash, ...], str]] = OrderedDict()
        self._offered = asyncio.Event()
        self._saving = asyncio.Lock()
        """A put that begins where another has not ended yet would have no parent there."""
        self.num_saved = 0
        """Blocks, and so with the two below."""
        self.num_dropped = 0
        self.num_loaded = 0

    def offer(self, chain: Sequence[BlockHash], root: BlockHash) -> None:
        """Let `chain`, which the engine has computed, be saved some time soon.

        `root` is what the chain was hashed from: it holds the tenant, and stands for it.
        """
        if not chain:
            return
        self._offers[chain[-1]] = tuple(chain), root.hex() if self._has_quotas else ""
        self._offers.move_to_end(chain[-1])
        if len(self._offers) > MAX_OFFERS:
            _, (dropped, _) = self._offers.popitem(last=False)
            self.num_dropped += len(dropped)
        self._offered.set()

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn what computing costs: a prefill of `num_tokens` that no cache had."""
        self._costs.computed(num_tokens, seconds)

    async def run(self) -> None:
        """Save what is offered, until cancelled."""
        while True:
            while self._offers:
                _, (chain, tenant) = self._offers.popitem(last=False)
                await self._save(chain, tenant)
            self._offered.clear()
            await self._offered.wait()

    async def save_now(self, chain: Sequence[BlockHash]) -> None:
        """Save what the engine's cache has of `chain`, before all that was offered; raises ServeError."""
        at = await self._mover.num_saved(chain)
        if at < len(chain):
            self.num_saved += await self._save_part(chain, at, "")

    async def reach(self, chain: Sequence[BlockHash], first: int) -> int:
        """Return the index after the last block of `chain` that should be loaded; `first`: none."""
        end = await self._mover.match(chain)
        return end if end > first and self._costs.is_worth(self._place(chain[:end])) else first

    async def load(
        self,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None = None,
    ) -> int:
        """Load blocks `first` and on into the engine's `block_ids`; return how many came, all right.

        A load that raises or is cancelled teaches what its seconds say: a place that hangs is left, too.
        """
        place = self._place(chain)
        began_at_s = self._clock.now_s()
        try:
            count = await self._mover.load(chain, block_ids, first, stripes)
        except BaseException:
            self._costs.ended_early(place, len(chain) - first, self._clock.now_s() - began_at_s)
            raise
        self._costs.loaded(place, count, self._clock.now_s() - began_at_s)
        self.num_loaded += count
        return count

    def _place(self, chain: Sequence[BlockHash]) -> str:
        """Return by what sort of way `chain` would come: they differ by ten times and more."""
        if self.own is None:
            return "elsewhere"
        found = self.own.match(chain)
        if found.num_blocks < len(chain):
            return "elsewhere"
        return "memory" if found.num_in_memory == len(chain) else "disk"

    async def _save(self, chain: Sequence[BlockHash], tenant: str) -> None:
        """Save what is missing of `chain`; drop what cannot be, from the first such block on."""
        size = self._block_bytes
        group = min(max(1, int(self._bytes_per_s * GROUP_S) // size), MAX_PUT_BLOCKS)
        at = 0
        try:
            at = await self._mover.num_saved(chain)
            while at < len(chain):
                end = min(at + group, len(chain))
                num_saved = await self._save_part(chain[:end], at, tenant)
                self.num_saved += num_saved
                at += num_saved
                await self._pause(num_saved * size / self._bytes_per_s)
                if at < end:
                    break
        except ServeError as error:
            event(log, "blocks not saved", level=logging.WARNING, blocks=len(chain) - at, error=error)
        self.num_dropped += len(chain) - at

    async def _save_part(self, chain: Sequence[BlockHash], first: int, tenant: str) -> int:
        block_ids = self._engine.match(chain)
        try:
            if len(block_ids) <= first:
                return 0
            async with self._saving:
                return await self._mover.save(chain[: len(block_ids)], block_ids[first:], first, tenant)
        finally:
            self._engine.release(block_ids, None)
