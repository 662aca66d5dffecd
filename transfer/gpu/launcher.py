"""Copies under way on one GPU: a slot for each, and the thread that waits for their ends.

The event loop launches, because it owns the batch: where a slot is free, from within `copy`, so that nothing
stands between a batch and the link. The thread waits without the interpreter, and wakes the loop
once for all the copies that have ended by then. What knows the device is handed in: `transport.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from base.errors import ProtocolError
from base.grants import Operation
from transfer.batch import Pieces, Priority
from transfer.completion import Completion, post
from transfer.gpu import copy_engine
from transfer.owned.device_access import CopyStream
from transfer.priority_pool import PriorityPool

MAX_LAUNCHES = 8
"""Launches under way on one GPU. While one batch is copied the next are planned, and several keep the
link full where one ends and the next begins."""
ALIGNMENT = 16
"""Addresses and lengths: the kernel moves 16 bytes a thread at a time."""
ROW_BYTES = 1 << 20
"""Longest range of one row: a longer one is cut, or its tiles outnumber everything else's."""
SHORT_ROW_BYTES = 16 << 10
"""Rows that are shorter on average are merged with their neighbours; longer ones gain nothing by it."""
NUM_ROWS = 4096
"""Rows that a table has at first."""


class Slot:
    """Writes the table of one batch at a time and begins its copy."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._cells = stream.make_cells(3 * NUM_ROWS)
        self._bases = np.zeros((3, 1), np.int64)
        self.wait = stream.wait

    def launch(self, operation: Operation, pieces: Pieces, peer_base: int, by_engine: bool) -> None:
        """Begin to copy; see `Launcher.copy`."""
        pieces, by_engine = _rows(pieces, by_engine)
        num_rows = len(pieces)
        if 3 * num_rows > len(self._cells):
            self._cells = self._stream.make_cells(6 * num_rows)
        cells = self._cells[: 3 * num_rows]
        base, numbers = pieces.segment.address, pieces.numbers
        if operation is Operation.WRITE:
            self._bases[0, 0], self._bases[2, 0] = base, peer_base
        else:
            self._bases[0, 0], self._bases[2, 0], numbers = peer_base, base, numbers[::-1]
        np.add(numbers, self._bases, out=cells.reshape(3, num_rows))
        # What they are sums of mostly shows it; not if it is no multiple.
        is_aligned = pieces.bits is not None and not (pieces.bits | base | peer_base) % ALIGNMENT
        if not is_aligned and int(np.bitwise_or.reduce(cells)) % ALIGNMENT:
            raise ProtocolError(f"GPU copies are of multiples of {ALIGNMENT} bytes")
        self._stream.start(num_rows, pieces.max_length, by_engine)


def _rows(pieces: Pieces, by_engine: bool) -> tuple[Pieces, bool]:
    """Return the pieces as they are to be copied, and whether by the copy engines."""
    if by_engine:
        merged = pieces.merged()
        if copy_engine.suits(merged.num_bytes, len(merged)):
            return merged, True
    if pieces.num_bytes < SHORT_ROW_BYTES * len(pieces):
        pieces = pieces.merged()
    return pieces.cut(ROW_BYTES), False


class Launcher:
    """Owns the slots of one GPU and the thread that waits for their ends, in order."""

    def __init__(self, make_stream: Callable[[], CopyStream], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots = PriorityPool(Slot(make_stream()) for _ in range(MAX_LAUNCHES))
        # An executor and its futures cost 20 us a batch, a tenth of 64 MiB over NVLink.
        self._launched: SimpleQueue[tuple[Slot, Completion] | None] = SimpleQueue()
        self._ended: deque[tuple[Completion, BaseException | None]] = deque()
        self._is_posted = False
        self._is_closed = False
        self._waiter = threading.Thread(target=self._wait, name="cuda-wait", daemon=True)
        self._waiter.start()

    async def copy(
        self, operation: Operation, pieces: Pieces, peer_base: int, by_engine: bool, priority: Priority
    ) -> None:
        """Copy and return when the bytes are there.

        Args:
            peer_base: Where the peer's segment begins, as an address of ours.
            by_engine: Rather than by the kernel, if the pieces are long enough.

        Raises:
            ProtocolError: something is not aligned.
            RuntimeError: CUDA failed, or nobody waits for copies any more.
        """
        slot = await self._slots.take(priority)
        try:
            if self._is_closed:
                raise RuntimeError("this process is stopping")
            slot.launch(operation, pieces, peer_base, by_engine)
            completion = Completion()
            self._launched.put((slot, completion))
            await completion.wait(cannot_be_cancelled)
        finally:
            self._slots.give_back(slot)

    def close(self) -> None:
        """End the thread, after what is under way."""
        self._is_closed = True
        self._launched.put(None)
        self._waiter.join()

    def _wait(self) -> None:
        while (launched := self._launched.get()) is not None:
            slot, completion = launched
            failure: BaseException | None = None
            try:
                slot.wait()
            except BaseException as error:
                # Whatever it is: without this thread no copy would end.
                failure = error
            self._ended.append((completion, failure))
            if not self._is_posted:
                self._is_posted = True
                post(self._loop, self._end_launches)

    def _end_launches(self) -> None:
        # First: what ends from here on wakes the loop again.
        self._is_posted = False
        while self._ended:
            completion, failure = self._ended.popleft()
            completion.end(failure)


def cannot_be_cancelled() -> None:
    """A launch ends within milliseconds, and cannot be taken back."""
