"""A GPU without a GPU: host memory that no segment shows, copied by the table that a kernel would get."""

import ctypes
import threading

import numpy as np

from transfer.gpu.launcher import ROW_BYTES
from transfer.owned import segment as segments
from transfer.owned.segment import DeviceMemory


class HostStream:
    """Copies when it is waited for, row by row, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.started: list[int] = []
        """Rows of each copy."""

    def make_cells(self, count):
        self.cells = np.zeros(count, np.int64)
        return self.cells

    def start(self, num_rows, max_bytes, by_engine):
        assert not by_engine
        self.rows = self.cells[: 3 * num_rows].reshape(3, num_rows).T.tolist()
        assert max(length for _, length, _ in self.rows) == max_bytes <= ROW_BYTES
        self.started.append(num_rows)

    def wait(self):
        self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        for source, length, target in self.rows:
            ctypes.memmove(target, source, length)


class HostAccess:
    """Keeps the streams that it made, for tests that hold them up or let them fail."""

    def __init__(self) -> None:
        self.streams: list[HostStream] = []
        self.pinned_left = 1 << 40

    def make_stream(self):
        self.streams.append(HostStream())
        return self.streams[-1]

    def pinned(self, num_bytes):
        if num_bytes > self.pinned_left:
            raise RuntimeError("CUDA error: out of memory")
        self.pinned_left -= num_bytes
        return memoryview(bytearray(num_bytes))


def device_memory(memory, access=None, device=0):
    """Return a bytearray, which must stay, as memory of a GPU."""
    address = segments.address_of(memoryview(memory))
    return DeviceMemory(address, len(memory), device, b"handle", access or HostAccess())
