"""Shared-memory transport: one host's DRAM, one copy, made by the peer that asks.

Small copies are made in place: 4 MiB take half a millisecond, a thread and back a fifth of that, or
many milliseconds where the processors are busy. Large ones run on a thread of their own, which looks
now and then whether the batch was cancelled or the grant ended.

`memmove` is called through ctypes in two ways. One lets go of the interpreter, so that large copies
stop nobody. The other keeps it: getting it back from a thread that computes in Python takes up to 5 ms,
and for each of 64 blocks of 64 KiB that came to 112 ms instead of 0.8 (AMD EPYC, 2026-11-22).

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

INLINE_BYTES = 4 << 20
"""A batch up to this size is copied on the event loop, and so much at most without letting others have
the interpreter."""
STEP_BYTES = 256 << 20
"""Copied between two looks at the grant: 25 to 60 ms. The C library stores past the caches only what is
large beside the last of them (from 251 MiB on where it was asked), which is 1.3 to 2 times as fast as
steps of 16 MiB (AMD EPYC, 2026-11-22)."""
SUMMED_STEP_BYTES = 1 << 20
"""Copied before it is summed, and the largest batch of which the loop does both: what a core's second
cache holds. In quarters of it the interpreter would be asked for four times as often, for 2 %."""

_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)
"""`ctypes.memmove`, but for the interpreter, which is kept."""


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
        if pieces.num_bytes <= (SUMMED_STEP_BYTES if pieces.wants_sums else INLINE_BYTES):
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
        pieces, board = self._pieces, self._peer.board
        base, num_bytes = board.host_memory_of(self._grant.segment_id)
        if pieces.peer_end > num_bytes:
            raise StaleError("the peer's segment has another size")
        with board.held(self._grant):
            if pieces.wants_sums:
                sums = [self._read_and_sum(base, *row) for row in pieces.rows()]
            else:
                self._copy(base)
        # Bytes put into the memory of a dead process arrived nowhere.
        if self._peer.is_dead():
            raise TransferFailedError("the peer's process ended during the copy")
        if pieces.wants_sums:
            pieces.sums = sums

    def _read_and_sum(self, base: int, offset: int, peer_offset: int, num_bytes: int) -> int:
        running = RunningChecksum()
        segment = self._pieces.segment
        for at in range(0, num_bytes, SUMMED_STEP_BYTES):
            self._require_wanted()
            length = min(SUMMED_STEP_BYTES, num_bytes - at)
            _memmove(segment.address + offset + at, base + peer_offset + at, length)
            running.add(segment.memory[offset + at : offset + at + length])
        return running.value()

    def _copy(self, base: int) -> None:
        address, is_read = self._pieces.segment.address, self._grant.operation is Operation.READ
        self._require_wanted()
        kept_bytes = 0
        for offset, peer_offset, length in self._pieces.cut(STEP_BYTES).rows():
            kept_bytes += length
            copy = _memmove
            if kept_bytes > INLINE_BYTES:
                self._require_wanted()
                copy, kept_bytes = ctypes.memmove, 0
            if is_read:
                copy(address + offset, base + peer_offset, length)
            else:
                copy(base + peer_offset, address + offset, length)

    def _require_wanted(self) -> None:
        if self._cancelled:
            raise TransferFailedError("cancelled")
        self._peer.board.require_live(self._grant)
