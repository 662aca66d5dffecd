"""Copies between two mapped segments, and the threads that make the large ones.

Pieces of some MiB are copied by `memmove` through ctypes, which lets go of the interpreter, so that
they stop nobody. Others are slices of memory assigned, which keeps it: getting it back from a thread
that computes in Python takes up to 5 ms, and for each of 64 blocks of 64 KiB that came to 112 ms instead
of 0.8 (AMD EPYC, 2026-11-22). A slice assigned also costs a third of a call through ctypes.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from base.errors import StaleError, TransferFailedError
from base.grants import Grant, Operation
from transfer.batch import Pieces, Priority, Row
from transfer.completion import Completion
from transfer.shm.mapped import MappedPeer

KEPT_BYTES = 4 << 20
"""Bytes that are copied at most without letting others have the interpreter: 0.3 to 0.5 ms."""
STEP_BYTES = 256 << 20
"""Bytes copied between two looks at the grant: 25 to 60 ms. The C library stores past the caches only what is
large beside the last of them (from 251 MiB on where it was asked), which is 1.3 to 2 times as fast as
steps of 16 MiB (AMD EPYC, 2026-11-22)."""
BACKGROUND_STEP_BYTES = 16 << 20
"""Bytes copied so for a batch that nobody waits for: one that is urgent waits 2 ms for it at most."""


def copy_here(peer: MappedPeer, grant: Grant, pieces: Pieces) -> None:
    """Copy a small batch on the event loop, or raise; see `Transport.move`."""
    theirs = peer.board.memory_of(grant.segment_id)
    # No `with`: a generator would take a microsecond of each.
    peer.board.hold(grant)
    try:
        _assign(theirs, pieces.segment.memory, pieces.rows(), grant.operation is Operation.READ)
    finally:
        peer.board.let_go(grant)
    require_alive(peer)


class Copy:
    """One batch, copied by `run` on a thread, or by `copy` on any."""

    def __init__(
        self,
        peer: MappedPeer,
        grant: Grant,
        pieces: Pieces,
        step_bytes: int = STEP_BYTES,
        between_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self._peer = peer
        self._grant = grant
        self._pieces = pieces
        self._step_bytes = step_bytes
        self._between_steps = between_steps
        self._is_cancelled = False
        self._completion = Completion()

    def cancel(self) -> None:
        """Have the copy fail at its next step."""
        self._is_cancelled = True

    async def ended(self) -> None:
        """Return or raise as the copy did; cancelled, it is taken back first."""
        await self._completion.wait(self.cancel)

    def run(self) -> None:
        """Copy everything, and let `ended` know."""
        try:
            self.copy()
        except BaseException as error:
            self._completion.end(error)
        else:
            self._completion.end(None)

    def copy(self) -> None:
        """Copy everything, or raise; see `Transport.move`."""
        pieces, board = self._pieces, self._peer.board
        theirs = board.memory_of(self._grant.segment_id)
        if pieces.peer_end > theirs.nbytes:
            raise StaleError("the peer's segment has another size")
        with board.held(self._grant):
            self._copy_in_steps(theirs)
        require_alive(self._peer)

    def _copy_in_steps(self, theirs: memoryview) -> None:
        ours, is_read = self._pieces.segment.memory, self._grant.operation is Operation.READ
        address, base = self._pieces.segment.address, self._peer.board.address_of(self._grant.segment_id)
        self._require_wanted()
        kept_bytes = 0
        for row in self._pieces.cut(self._step_bytes).rows():
            offset, peer_offset, length = row
            kept_bytes += length
            if kept_bytes <= KEPT_BYTES:
                _assign(theirs, ours, (row,), is_read)
                continue
            kept_bytes = 0
            self._between_steps()
            self._require_wanted()
            if is_read:
                ctypes.memmove(address + offset, base + peer_offset, length)
            else:
                ctypes.memmove(base + peer_offset, address + offset, length)

    def _require_wanted(self) -> None:
        if self._is_cancelled:
            raise TransferFailedError("cancelled")
        self._peer.board.require_live(self._grant)


class Copiers:
    """A thread that copies: first what a request waits for, and between the steps of anything else too."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="shm-copy")
        self._urgent: deque[Copy] = deque()
        self._background: deque[Copy] = deque()

    def begin(self, peer: MappedPeer, grant: Grant, pieces: Pieces, priority: Priority) -> Copy:
        """Have a batch copied. Whoever asks waits for its end.

        Raises:
            TransferFailedError: there is no thread. Nothing is copied.
        """
        if priority is Priority.FOREGROUND:
            copy = Copy(peer, grant, pieces)
            self._urgent.append(copy)
        else:
            copy = Copy(peer, grant, pieces, BACKGROUND_STEP_BYTES, self._run_urgent)
            self._background.append(copy)
        try:
            self._threads.submit(self._run_next)
        except RuntimeError as error:
            # It may stand in line for a thread that somebody else's batch gets.
            copy.cancel()
            raise TransferFailedError(f"no thread copies: {error}") from error
        return copy

    async def close(self) -> None:
        """End when everything has been copied or taken back."""
        await asyncio.to_thread(self._threads.shutdown)

    def _run_next(self) -> None:
        if not self._run_one(self._urgent):
            self._run_one(self._background)

    def _run_urgent(self) -> None:
        while self._run_one(self._urgent):
            pass

    def _run_one(self, queue: deque[Copy]) -> bool:
        try:
            copy = queue.popleft()
        except IndexError:
            # Another thread was quicker.
            return False
        copy.run()
        return True


def _assign(theirs: memoryview, ours: memoryview, rows: Iterable[Row], is_read: bool) -> None:
    try:
        if is_read:
            for offset, peer_offset, length in rows:
                ours[offset : offset + length] = theirs[peer_offset : peer_offset + length]
        else:
            for offset, peer_offset, length in rows:
                theirs[peer_offset : peer_offset + length] = ours[offset : offset + length]
    except ValueError as error:
        raise StaleError("the peer's segment has another size") from error


def require_alive(peer: MappedPeer) -> None:
    """Raise TransferFailedError if the peer has ended."""
    # Bytes put into the memory of a dead process arrived nowhere.
    if peer.is_dead():
        raise TransferFailedError("the peer's process ended during the copy")
