"""Shared-memory transport: one host's DRAM, one copy, made by the peer that asks.

Small copies are made in place: 4 MiB take half a millisecond, a thread and back a fifth to a half of that,
or many milliseconds where the processors are busy. What a request waits for is copied so up to 16 MiB, with
a turn of the event loop after 8. Large batches, and what nobody waits for, run on a thread of their own,
which looks now and then whether the batch was cancelled or the grant ended. To have the loop copy the first
4 MiB while that thread wakes up brought nothing on two cores. How bytes are copied: `copies.py`.
"""

from __future__ import annotations

import asyncio

from base.clock import SystemClock
from base.errors import TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.shm.copies import KEPT_BYTES, SUMMED_STEP_BYTES, Copiers, Copy, copy_here
from transfer.shm.mapped import MappedPeers
from transfer.transport import Transport

INLINE_BYTES = KEPT_BYTES
"""A batch up to this size is copied on the event loop at once."""
TURN_BYTES = 8 << 20
"""Copied between two turns of the loop of what it copies in several: 0.6 to 1 ms on slow memory. A turn takes
50 us, because the copy has emptied the caches that it runs from."""
IN_TURNS_BYTES = 16 << 20
"""An urgent batch up to this size is copied so; in one turn where, at the last copy's pace, KEPT_S does."""
KEPT_S = 1e-3
_now_s = SystemClock().now_s


class ShmTransport(Transport):
    """Owns the mappings of peers' memory and the threads that copy."""

    name = "shm"

    def __init__(self) -> None:
        self._peers = MappedPeers()
        self._copiers = Copiers(1, "shm-copy")
        self._summers = Copiers(2, "shm-sum")
        self._turn_bytes = TURN_BYTES

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
        if pieces.num_bytes <= INLINE_BYTES and not pieces.wants_sums:
            copy_here(self._peers.latest(peer), grant, pieces.segment.memory, pieces.rows())
            return
        if pieces.num_bytes <= SUMMED_STEP_BYTES:
            Copy(self._peers.latest(peer), grant, pieces).run()
            return
        if pieces.num_bytes <= IN_TURNS_BYTES and priority is Priority.FOREGROUND and not pieces.wants_sums:
            ours = pieces.segment.memory
            *groups, last = pieces.grouped(self._turn_bytes, pieces.num_bytes)
            for group in groups:
                copy_here(self._peers.latest(peer), grant, ours, group.rows())
                await asyncio.sleep(0)
            begun_s = _now_s()
            copy_here(self._peers.latest(peer), grant, ours, last.rows())
            is_fast = IN_TURNS_BYTES * (_now_s() - begun_s) < KEPT_S * last.num_bytes
            self._turn_bytes = IN_TURNS_BYTES if is_fast else TURN_BYTES
            return
        copiers = self._summers if pieces.wants_sums else self._copiers
        with self._peers.copying(peer) as mapped:
            await copiers.begin(mapped, grant, pieces, priority).ended()

    async def close(self) -> None:
        await self._copiers.close()
        await self._summers.close()
        self._peers.close()
