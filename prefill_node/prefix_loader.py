"""Loads a prefix from elsewhere into this node's cache, before the prompt is computed.

A prefix source is whatever has KV that this engine's cache lacks: the node's own store and,
through it, the cluster's block cache (`kvstore/engine_store.py`); or blocks of another node,
lent because the conductor found that reading them is sooner done than computing them. They
are asked in that order, each for what is still missing.

Loaded blocks are compared with the checksums made where they were computed and published
here, so that the engine's own prefix match finds them, and a replica stays on this node, which is
how hot blocks spread.

Where the engine can wait layer by layer, the last blocks come while the prompt is computed: the
sequence begins with them as if they were there (`engine/arrivals.py`), and nothing of it is sent or
published before they are compared.

KV that cannot be loaded is never an error: the prompt is computed from what is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from base.block_hash import BlockHash, hash_chain
from base.clock import Clock
from base.errors import ServeError
from base.logs import event
from base.messages import Work
from base.request import RequestId
from base.uninterrupted import uninterrupted
from engine.arrivals import PrefixArrivals
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from kvstore.client import Stripes

log = logging.getLogger(__name__)


class PrefixSource(Protocol):
    """Where blocks of a chain can be had, other than by computing them."""

    async def reach(self, chain: Items[BlockHash], first: int) -> int:
        """Return the index after the last block worth loading, if block `first` is the first missing."""
        ...

    async def load(
        self, chain: Items[BlockHash], block_ids: Items[int], first: int, stripes: Stripes | None, /
    ) -> int:
        """Put blocks `first` to the end of `chain` into `block_ids`; return how many came, all right.

        Args:
            stripes: Notified of what is there meanwhile, where that is known.

        Raises:
            ServeError: they cannot be had, or are not what they should be.
        """
        ...


class Prefix:
    """The blocks of a prompt's beginning, as they are found and loaded. Belongs to the event loop."""

    def __init__(self, pool: BlockPool, request_id: RequestId) -> None:
        self._pool = pool
        self._request_id = request_id
        self.chain: list[BlockHash] = []
        """The hashes of the prompt's blocks before the one of its last token."""
        self.block_ids: list[int] = []
        """Held. The leading ones are published."""
        self.arrivals: PrefixArrivals | None = None
        """The arrival of the last blocks, while they are loaded layer by layer; None: none are."""
        self._loading: asyncio.Task[int] | None = None
        self._source: PrefixSource | None = None
        """The source that is loaded from."""
        self._chain: Items[BlockHash] = ()
        """The hashes of the blocks that are being loaded."""
        self._parent: BlockHash | None = None
        """The hash of the block before them; None: there is none."""

    async def load(
        self, chain: Items[BlockHash], source: PrefixSource, clock: Clock, parts: Items[int] = ()
    ) -> None:
        """Take in what comes from `source`; return when all of it is there, or of several `parts` the first.

        Args:
            parts: As in `loaded_prefix`.
        """
        first, self._source = len(self.block_ids), source
        with self._logged():
            if first >= len(chain) or (end := min(await source.reach(chain, first), len(chain))) <= first:
                return
            block_ids = self._pool.allocate_spare(end - first)
            self.block_ids += block_ids
            self._chain, self._parent = chain[first:end], chain[first - 1] if first else None
            has_begun, stripes = asyncio.Event(), None
            if parts:
                arrivals = self.arrivals = PrefixArrivals(parts, clock, block_ids[0])

                def on_arrived(count: int) -> None:
                    arrivals.arrived(count)
                    has_begun.set()

                stripes = Stripes(tuple(parts), on_arrived)
            self._loading = asyncio.create_task(source.load(chain[:end], block_ids, first, stripes))
            self._loading.add_done_callback(lambda _: has_begun.set())
            await has_begun.wait()
            if self._loading.done():
                await self._settle()

    def give_to(self, sequence: Sequence, block_size: int) -> None:
        """Let `sequence`, which the engine has not yet, begin after what is still coming in."""
        sequence.block_hashes += self.chain
        if self.arrivals is None:
            return
        self._pool.hold(self.block_ids)
        sequence.begin_after(self.block_ids, block_size)
        sequence.arrivals = self.arrivals
        sequence.is_proven = False

    async def is_intact(self) -> bool:
        """Return whether all that was coming has come, and is right; then others may match it."""
        return self._loading is None or await self._num_right() == len(self._chain)

    async def _settle(self) -> None:
        """Keep what has come and is right, now that nothing more does."""
        kept = len(self.block_ids) - len(self._chain) + await self._num_right()
        self._pool.release(self.block_ids[kept:])
        del self.block_ids[kept:]
        self.arrivals = self._loading = None

    async def _num_right(self) -> int:
        """Wait for what is coming and let others match what is right of it; return how many blocks."""
        assert self._loading is not None
        count = 0
        with self._logged():
            count = await self._loading
        if self.arrivals is not None:
            self.arrivals.end()
        coming = self.block_ids[len(self.block_ids) - len(self._chain) :]
        parent = self._parent
        for block_id, block_hash in zip(coming[:count], self._chain, strict=False):
            self._pool.publish(block_id, block_hash, parent)
            parent = block_hash
        return count

    async def close(self) -> None:
        """Give everything back; what is being loaded has ended by then."""
        try:
            if self._loading is not None:
                self._loading.cancel()
                await uninterrupted(asyncio.wait([self._loading]))
        finally:  # who is cancelled here has waited all the same
            self._loading = None  # it holds what it raised, whose traceback holds us
            if self.arrivals is not None:
                self.arrivals.end()
            self._pool.release(self.block_ids)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log a failure to load in the body, and go on."""
        try:
            yield
        except ServeError as error:
            event(
                log,
                "prefix not loaded",
                level=logging.WARNING,
                request_id=self._request_id,
                source=type(self._source).__name__,
                reason=f"{type(error).__name__}: {error}",
            )


@asynccontextmanager
async def loaded_prefix(
    pool: BlockPool,
    block_size: int,
    work: Work,
    sources: Items[PrefixSource],
    clock: Clock,
    parts: Items[int] = (),
) -> AsyncIterator[Prefix]:
    """Have what the sources can give in this node's cache, and held, for the body.

    Args:
        parts: Layers of each part in which what the last source gives may come while the body runs;
            empty: it may not.
    """
    prefix = Prefix(pool, work.request_id)
    try:
        # The last token is always computed, so a block that ends with it is not needed.
        longest = (len(work.token_ids) - 1) // block_size
        tokens = work.token_ids[: longest * block_size]
        chain = prefix.chain = hash_chain(tokens, block_size, work.chain_root)
        prefix.block_ids += pool.match(chain) if sources else []
        for source in sources:
            await prefix.load(chain, source, clock, parts if source is sources[-1] else ())
        yield prefix
    finally:
        await prefix.close()
