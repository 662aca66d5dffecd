"""Context caching for other programs: KV blocks put and got by token ids.

    async with connected(stores=["10.0.0.5:7000"]) as cache:
        context = ContextCache(cache, model_id, layout, "acme", tenant_salt)
        segment = context.segment(len(token_ids))
        num_tokens = await context.get(token_ids, segment)

The paper's context-caching API. A program that is no node of the cluster names a prompt by
its token ids; the tenant's salt is in the root of the hash chain, so no tenant finds, reads
or deletes what another stored, and none can find out whether it is there.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from base.block_hash import BlockHash, chain_root, hash_chain
from base.checksum import CHECKSUM_KIND, checksum_of_kind
from base.clock import SystemClock
from base.config import TlsConfig, TransferConfig
from base.kv_layout import KvLayout, kv_id
from kvstore.client import BlockCache
from kvstore.hosting import block_cache
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment, over


@asynccontextmanager
async def connected(
    stores: Sequence[str] = (),
    redis_url: str = "",
    transfer: TransferConfig | None = None,
    tls: TlsConfig | None = None,
) -> AsyncIterator[BlockCache]:
    """A program's way into the cluster's cache, for the length of the body.

    Args:
        stores: host:port of every store, as their processes print it; not needed with Redis.
        redis_url: Of the directory that the stores share.
        transfer: How bytes move; by default whatever both ends have.
        tls: With `ca`, where the stores have TLS: a node's certificate, because who has one reaches every
            tenant's blocks.
    """
    clock = SystemClock()
    async with (
        TransferAgent("outside", secrets.randbits(63), transfer or TransferConfig(), clock) as agent,
        block_cache(redis_url, stores, agent, clock, tls) as cache,
    ):
        yield cache


def private_segment(num_bytes: int) -> Segment:
    """Return memory to move from and into, which no peer is ever granted: it has no id."""
    return over(0, memoryview(mmap.mmap(-1, num_bytes)))


class ContextCache:
    """One tenant's view of the cluster's block cache."""

    def __init__(
        self,
        cache: BlockCache,
        model_id: str,
        layout: KvLayout,
        tenant: str,
        tenant_salt: str,
        checksum_kind: str = CHECKSUM_KIND,
        weights: str = "none",
    ) -> None:
        """Begin.

        Args:
            cache: How blocks are reached.
            model_id: As the nodes'; other weights have other blocks.
            layout: As the nodes'.
            tenant: Whose quota pays.
            tenant_salt: A secret of the tenant.
            checksum_kind: As the nodes'; it ends their layout id: xxh3, or sum-words where they
                are on GPUs.
            weights: The format of the nodes' weights, as `conductor status` shows it; none: floats, or
                `mixed_weights`.
        """
        self._cache = cache
        self._layout = layout
        self._tenant = tenant
        self._checksum = checksum_of_kind(checksum_kind)
        # As nodes name what they hand off with this checksum: their blocks are ours too.
        self._root = chain_root(model_id, kv_id(layout, checksum_kind, weights), tenant_salt)

    def chain(self, token_ids: Sequence[int]) -> list[BlockHash]:
        """Return the names of the full blocks of `token_ids`."""
        return hash_chain(token_ids, self._layout.block_size, self._root)

    def segment(self, num_tokens: int) -> Segment:
        """Return memory for the full blocks of so many tokens: block i at i * block_bytes."""
        num_blocks = max(1, num_tokens // self._layout.block_size)
        return private_segment(num_blocks * self._layout.block_bytes)

    async def match(self, token_ids: Sequence[int]) -> int:
        """Return for how many leading tokens KV is stored; a multiple of the block size."""
        return await self._cache.match(self.chain(token_ids)) * self._layout.block_size

    async def get(self, token_ids: Sequence[int], into: Segment) -> int:
        """Load the KV of the longest stored prefix; return its tokens, as `match` does."""
        chain = self.chain(token_ids)

        async def sums(offsets: Sequence[int]) -> Sequence[int]:
            return await asyncio.to_thread(self._sums, into, offsets)

        num_blocks = await self._cache.load(chain, into, self._offsets(len(chain)), sums=sums)
        return num_blocks * self._layout.block_size

    async def put(self, token_ids: Sequence[int], source: Segment) -> int:
        """Store the KV of the full blocks of `token_ids`; return the tokens newly stored.

        `source` holds block i at i * block_bytes, as `layout` says. What is stored already costs no bytes.
        """
        chain = self.chain(token_ids)
        offsets = self._offsets(len(chain))
        sums = await asyncio.to_thread(self._sums, source, offsets)
        num_stored = await self._cache.save(chain, source, offsets, sums, tenant=self._tenant)
        return num_stored * self._layout.block_size

    async def delete(self, token_ids: Sequence[int]) -> int:
        """Forget the prompt wherever nothing else of this tenant needs its blocks."""
        return await self._cache.delete(self.chain(token_ids))

    def _sums(self, segment: Segment, offsets: Sequence[int]) -> list[int]:
        size = self._layout.block_bytes
        return [self._checksum(segment.memory[offset : offset + size]) for offset in offsets]

    def _offsets(self, num_blocks: int) -> list[int]:
        return [index * self._layout.block_bytes for index in range(num_blocks)]
