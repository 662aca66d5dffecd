"""Shared-memory transport: one host's DRAM, one copy, made by the peer that asks.

Large copies run on a thread of their own in steps, by `memmove` called through ctypes,
which lets go of the interpreter (slice assignment of memoryviews does not: 256 MiB
would stop the process for 60 ms). Between steps the thread looks whether the batch was
cancelled, the grant ended or the peer died. Small copies are made in place: 256 KiB take
60 us, a thread and back takes longer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from base.errors import StaleError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer.batch import Piece, Priority
from transfer.board import PeerBoard
from transfer.completion import Completion

INLINE_BYTES = 256 << 10
"""A batch up to this size is copied on the event loop."""
STEP_BYTES = 4 << 20
"""Copied between two looks at the grant: 1 ms."""


class ShmTransport:
    """Owns the mappings of peers' memory and the thread that copies."""

    name = "shm"

    def __init__(self, num_threads: int = 1) -> None:
        self._peers: dict[str, _Peer] = {}
        self._copiers = ThreadPoolExecutor(num_threads, thread_name_prefix="shm-copy")

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int) -> str | None:
        if peer.address_or_none(self.name) is None:
            return "the peer does not offer it"
        try:
            mapped = self._mapped(peer)
        except TransferFailedError as error:
            return str(error)
        return None if mapped.board.is_shown(segment_id) else "the segment is private memory"

    async def move(
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
        mapped = self._mapped(peer)
        copy = _Copy(mapped, grant, pieces)
        if copy.num_bytes <= INLINE_BYTES:
            copy.run()
            return
        mapped.num_copies += 1
        try:
            completion = Completion()
            self._copiers.submit(copy.run).add_done_callback(lambda done: completion.end(done.exception()))
            await completion.wait(copy.cancel)
        finally:
            mapped.num_copies -= 1

    async def close(self) -> None:
        await asyncio.to_thread(self._copiers.shutdown)
        for mapped in self._peers.values():
            mapped.close()
        self._peers.clear()

    def _mapped(self, peer: PeerDescriptor) -> _Peer:
        """Return the peer's memory, mapped; an earlier epoch of it is dropped."""
        mapped = self._peers.get(peer.node_id)
        if mapped is not None and mapped.epoch == peer.epoch and not mapped.is_dead():
            return mapped
        if mapped is not None and mapped.num_copies == 0:
            del self._peers[peer.node_id]
            mapped.close()
        address = peer.address_or_none(self.name)
        if address is None:
            raise TransferFailedError(f"{peer.node_id} has no shared memory")
        fresh = self._peers[peer.node_id] = _Peer(address, peer.epoch)
        return fresh


class _Peer:
    """One process whose memory is mapped here, and the means to notice its end."""

    def __init__(self, address: str, epoch: int) -> None:
        self.epoch = epoch
        self.num_copies = 0
        self.board = PeerBoard(address, epoch)
        try:
            self._pidfd = os.pidfd_open(self.board.pid)
        except OSError as error:
            self.board.close()
            raise TransferFailedError(f"the peer's process is gone: {error}") from error

    def is_dead(self) -> bool:
        # Readable once the process has ended. A poll object for each call: two threads ask
        # at a time, and one object refuses that.
        end = select.poll()
        end.register(self._pidfd, select.POLLIN)
        return bool(end.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)
        self.board.close()


class _Copy:
    """One batch. `run` on the copying thread, `cancel` from the event loop."""

    def __init__(self, peer: _Peer, grant: Grant, pieces: Sequence[Piece]) -> None:
        self._peer = peer
        self._grant = grant
        self._pieces = pieces
        self._cancelled = False
        self.num_bytes = sum(piece.length for piece in pieces)

    def cancel(self) -> None:
        self._cancelled = True

    def run(self) -> None:
        """Copy everything, or raise; see `Transport.move`."""
        memory = self._peer.board.memory_of(self._grant.segment_id)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._peer.board.held(self._grant):
            for piece in self._pieces:
                if piece.peer_offset + piece.length > memory.nbytes:
                    raise StaleError("the peer's segment has another size")
                self._copy_piece(base + piece.peer_offset, piece)
        # Bytes put into the memory of a dead process arrived nowhere.
        if self._peer.is_dead():
            raise TransferFailedError("the peer's process ended during the copy")

    def _copy_piece(self, peer_address: int, piece: Piece) -> None:
        is_write = self._grant.operation is Operation.WRITE
        for start in range(0, piece.length, STEP_BYTES):
            if self._cancelled:
                raise TransferFailedError("cancelled")
            if start:
                self._peer.board.require_live(self._grant)
            ours, theirs = piece.address + start, peer_address + start
            length = min(STEP_BYTES, piece.length - start)
            if is_write:
                ctypes.memmove(theirs, ours, length)
            else:
                ctypes.memmove(ours, theirs, length)
