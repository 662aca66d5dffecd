"""Blocks of one store that another node reads, and blocks of another node that a store takes in.

Both at the conductor's word: it names the one that holds a prefix, and that one lets the other
read it, until it says `Release`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from base.block_hash import BlockHash
from base.errors import LostError, ProtocolError
from base.messages import FromNode, Lend, Lent, Source
from kvstore.store import LEASE_S, Store
from transfer.agent import TransferAgent
from transfer.batch import batch_of


async def lend_stored(store: Store, message: Lend, send: Callable[[FromNode], None]) -> None:
    """Hold what `message` asks for, say where it may be read, and wait to be cancelled.

    Raises:
        LostError: none of the blocks is here any more.
        CapacityError: too many grants are live.
    """
    leased = await store.lease(message.chain, message.first_block)
    try:
        if leased.grant is None:
            raise LostError("the blocks were evicted")
        send(Lent(message.request_id, leased.grant, leased.checksums))
        await asyncio.sleep(min(message.lease_s, LEASE_S))
    finally:
        await store.release(leased.ticket)


async def store_lent(
    store: Store,
    agent: TransferAgent,
    sum_of: Callable[[memoryview], int],
    chain: Sequence[BlockHash],
    source: Source,
) -> bool:
    """Read what is missing of `chain` from who lent it, and keep what is right; return whether all is.

    Nothing is read where a block before the first that was lent is missing too.

    Raises:
        ServeError: it cannot be read, or there is no room.
    """
    if len(source.checksums) != len(source.grant.offsets):
        raise ProtocolError("a block is lent with a checksum")
    reserved = store.reserve(chain, "")
    try:
        if reserved.grant is None or reserved.missing[0] < source.first_block:
            return True
        wanted = [index - source.first_block for index in reserved.missing]
        offsets, size = reserved.grant.offsets, reserved.grant.length
        batch = batch_of(store.segment, [source.grant.offsets[index] for index in wanted], offsets, size)
        await agent.read(source.peer, source.grant, batch)
        views = [store.segment.memory[offset : offset + size] for offset in offsets]
        found = await asyncio.to_thread(lambda: [sum_of(view) for view in views])
        expected = [source.checksums[index] for index in wanted]
        sums = [value if value == right else None for value, right in zip(found, expected, strict=True)]
        await store.commit(reserved.ticket, sums)
        return None not in sums
    finally:
        await store.abort(reserved.ticket)  # of no effect after a commit
