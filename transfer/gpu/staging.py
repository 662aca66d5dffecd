"""A GPU's memory on the asked side of a wire: payloads lie in pinned host memory in between.

A frame is copied in one go when it is whole, or before its answer is sent: 0.1 ms for 4 MiB, a tenth of
what the wire takes for them, for which the thread that serves it waits.
"""

from __future__ import annotations

import threading

import numpy as np

from base.errors import TransferFailedError
from base.grants import Operation
from transfer.batch import Pieces
from transfer.gpu.launcher import Slot
from transfer.owned import segment as segments
from transfer.owned.device_access import DeviceAccess
from transfer.owned.ranges import Offsets
from transfer.owned.segment import Segment


class PinnedStaging:
    """The `Staging` of one segment. Made anywhere, in seconds at worst; then for the threads of a wire."""

    def __init__(self, segment: Segment, access: DeviceAccess, buffer_bytes: int) -> None:
        self._segment = segment
        self._access = access
        self._buffer_bytes = buffer_bytes
        self._slot = Slot(access.make_stream())
        # One copy at a time: the GPU is several times as fast as all wires together.
        self._lock = threading.Lock()
        self._answers = self.buffer()

    def buffer(self) -> Segment:
        try:
            return segments.over(0, self._access.pinned(self._buffer_bytes))
        except RuntimeError as error:
            raise TransferFailedError(f"no pinned host memory: {error}") from error

    def put(self, buffer: Segment, offsets: Offsets, lengths: Offsets) -> None:
        with self._lock:
            self._copy(Operation.READ, buffer, offsets, lengths)

    def fetched(self, offsets: Offsets, lengths: Offsets) -> memoryview:
        with self._lock:
            self._copy(Operation.WRITE, self._answers, offsets, lengths)
            # The pinned memory is wanted for the next answer while this one waits for its turn on the wire.
            return memoryview(bytes(self._answers.memory[: int(lengths.sum())]))

    def _copy(self, operation: Operation, buffer: Segment, offsets: Offsets, lengths: Offsets) -> None:
        pieces = Pieces(self._segment, np.stack((offsets, lengths, lengths.cumsum() - lengths)))
        try:
            self._slot.launch(operation, pieces, buffer.address, by_engine=True)
            self._slot.wait()
        except RuntimeError as error:
            raise TransferFailedError(f"the GPU gave up: {error}") from error
