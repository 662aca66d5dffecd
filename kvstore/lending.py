"""Lends blocks of a store to another node's prefill, at the conductor's word.

What a node that hosts a store and a storage process have in common: the conductor names the
one that holds a prefix, and that one lets the other read it, until it says `Release`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.errors import LostError
from base.messages import FromNode, Lend, Lent
from kvstore.store import LEASE_S, Store


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
