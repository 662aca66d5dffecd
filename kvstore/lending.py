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
from transfer.batch import pieces_of


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


async def store_lent(store: Store, agent: TransferAgent, chain: Sequence[BlockHash], source: Source) -> None:
    """Read what is missing of `chain` from who lent it into `store`, under the checksums it was lent with.

    They are compared by who loads it from there, which forgets what is not right. Nothing is read
    where a block before the first that was lent is missing too.

    Raises:
        ServeError: it cannot be read, or there is no room.
    """
    if len(source.checksums) != len(source.grant.offsets):
        raise ProtocolError("a block is lent with a checksum")
    reserved = store.reserve(chain, "")
    try:
        if reserved.grant is None or reserved.missing[0] < source.first_block:
            return
        wanted = [index - source.first_block for index in reserved.missing]
        sources = [source.grant.offsets[index] for index in wanted]
        pieces = pieces_of(store.segment, reserved.grant.offsets, sources, reserved.grant.length)
        await agent.read(source.peer, source.grant, pieces)
        await store.commit(reserved.ticket, [source.checksums[index] for index in wanted])
    finally:
        await store.abort(reserved.ticket)  # of no effect after a commit
