"""Shared-memory transport: one host's DRAM, one copy, made by the peer that asks.

Large copies run on a thread of their own in steps, by `memmove` called through ctypes,
which lets go of the interpreter (slice assignment of memoryviews does not: 256 MiB
would stop the process for 60 ms). Between steps the thread looks whether the batch was
cancelled, the grant ended or the peer died. Small copies are made in place: a MiB takes
0.1 ms, a thread and back takes longer.

Checksums that are asked for are taken of each step right after it, while the bytes are in the
processor's cache, and such batches have two threads: one core that copies and sums does 0.7 to
0.8 of what it copies alone. To copy whole batches and sum them on another core afterwards, which
takes as many cores, made each byte come from memory twice and was slower.
"""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import ThreadPoolExecutor

from base.checksum import RunningChecksum
from base.errors import StaleError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.completion import Completion
from transfer.mapped import MappedPeer, MappedPeers

INLINE_BYTES = 1 << 20
"""A batch up to this size is copied on the event loop."""
STEP_BYTES = 16 << 20
"""Copied between two looks at the grant: 4 ms. From about here on the C library stores past the caches,
which is 6 % faster than four copies of 4 MiB (2.5 GHz Xeon, 2026-11-21)."""
SUMMED_STEP_BYTES = 1 << 20
"""The same where what was copied is summed: what a core's second cache holds. In quarters of it the
interpreter would be asked for four times as often, for 2 %."""


class ShmTransport:
    """Owns the mappings of peers' memory and the threads that copy."""

    name = "shm"

    def __init__(self) -> None:
        self._peers = MappedPeers()
        self._copiers = ThreadPoolExecutor(1, thread_name_prefix="shm-copy")
        self._summers = ThreadPoolExecutor(2, thread_name_prefix="shm-sum")

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
        if pieces.num_bytes <= INLINE_BYTES:
            _Copy(self._peers.latest(peer), grant, pieces).run()
            return
        mapped = self._peers.mapped(peer)
        copy = _Copy(mapped, grant, pieces)
        mapped.num_copies += 1
        try:
            completion = Completion()
            threads = self._summers if pieces.wants_sums else self._copiers
            threads.submit(copy.run).add_done_callback(lambda done: completion.end(done.exception()))
            await completion.wait(copy.cancel)
        finally:
            mapped.num_copies -= 1

    async def close(self) -> None:
        await asyncio.to_thread(self._copiers.shutdown)
        await asyncio.to_thread(self._summers.shutdown)
        self._peers.close()


class _Copy:
    """One batch. `run` on the copying thread, `cancel` from the event loop."""

    def __init__(self, peer: MappedPeer, grant: Grant, pieces: Pieces) -> None:
        self._peer = peer
        self._grant = grant
        self._pieces = pieces
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def run(self) -> None:
        """Copy everything, or raise; see `Transport.move`."""
        base, num_bytes = self._peer.board.host_memory_of(self._grant.segment_id)
        with self._peer.board.held(self._grant):
            sums = []
            for offset, peer_offset, length in self._pieces.rows():
                if peer_offset + length > num_bytes:
                    raise StaleError("the peer's segment has another size")
                if self._pieces.wants_sums:
                    sums.append(self._copy_and_sum(offset, base + peer_offset, length))
                else:
                    self._copy_piece(offset, base + peer_offset, length)
        # Bytes put into the memory of a dead process arrived nowhere.
        if self._peer.is_dead():
            raise TransferFailedError("the peer's process ended during the copy")
        if self._pieces.wants_sums:
            self._pieces.sums = sums

    def _copy_and_sum(self, offset: int, peer_address: int, num_bytes: int) -> int:
        running = RunningChecksum()
        memory = self._pieces.segment.memory
        for start in range(0, num_bytes, SUMMED_STEP_BYTES):
            length = min(SUMMED_STEP_BYTES, num_bytes - start)
            self._copy_piece(offset + start, peer_address + start, length)
            running.add(memory[offset + start : offset + start + length])
        return running.value()

    def _copy_piece(self, offset: int, peer_address: int, num_bytes: int) -> None:
        board, grant = self._peer.board, self._grant
        source, target = self._pieces.segment.address + offset, peer_address
        if grant.operation is Operation.READ:
            source, target = target, source
        for start in range(0, num_bytes, STEP_BYTES):
            if self._cancelled:
                raise TransferFailedError("cancelled")
            board.require_live(grant)
            ctypes.memmove(target + start, source + start, min(STEP_BYTES, num_bytes - start))
