"""Shared-memory transport: one host's DRAM, one copy, made by the peer that asks.

Small copies are made in place: 4 MiB take half a millisecond, a thread and back a fifth to a half of that,
or many milliseconds where the processors are busy. What a request waits for is copied so up to 16 MiB, with
a turn of the event loop after 8. Large batches, and what nobody waits for, run on a thread of their own,
which looks now and then whether the batch was cancelled or the grant ended. To have the loop copy the first
4 MiB while that thread wakes up brought nothing on two cores. How bytes are copied: `copies.py`.
"""

from __future__ import annotations

import asyncio

from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.shm.copies import KEPT_BYTES, Copiers, copy_here
from transfer.shm.mapped import MappedPeers
from transfer.transport import OfferedTransport, Transport

INLINE_BYTES = KEPT_BYTES
"""A batch up to this size is copied on the event loop at once."""
TURN_BYTES = 8 << 20
"""Bytes copied between two turns of the loop: 0.6 to 1 ms on slow memory. A turn takes 50 us, because the
copy has emptied the caches that it runs from."""
IN_TURNS_BYTES = 16 << 20
"""Largest urgent batch that the loop copies so."""


def offer(host: object) -> OfferedTransport:
    """Return the transport."""
    return OfferedTransport(ShmTransport())


class ShmTransport(Transport):
    """Owns the mappings of peers' memory and the threads that copy."""

    name = "shm"

    def __init__(self) -> None:
        self._peers = MappedPeers()
        self._copiers = Copiers()

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if device is not None:
            return "our memory is a GPU's"
        if peer.address_or_none(self.name) is None:
            return "the peer does not offer it"
        try:
            mapped = self._peers.mapped(peer)
        except TransferFailedError as error:
            return str(error)
        is_shown = mapped.board.shows(segment_id, on_device=False)
        return None if is_shown else "the peer's segment is not shared host memory"

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        pieces = pieces.merged()
        if pieces.num_bytes <= INLINE_BYTES:
            copy_here(self._peers.latest(peer), grant, pieces)
            return
        if pieces.num_bytes <= IN_TURNS_BYTES and priority is Priority.FOREGROUND:
            *groups, last = pieces.grouped(TURN_BYTES, pieces.num_bytes)
            for group in groups:
                copy_here(self._peers.latest(peer), grant, group)
                await asyncio.sleep(0)
            copy_here(self._peers.latest(peer), grant, last)
            return
        with self._peers.copying(peer) as mapped:
            await self._copiers.begin(mapped, grant, pieces, priority).ended()

    async def close(self) -> None:
        await self._copiers.close()
        self._peers.close()
