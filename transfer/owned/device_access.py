"""The interface of a GPU that the transfer layer needs. It is handed in with the GPU's memory."""

from __future__ import annotations

from typing import Protocol

from transfer.owned.ranges import Offsets


class CopyStream(Protocol):
    """A stream of a device, and the memory for the table of what is copied on it."""

    def make_cells(self, count: int) -> Offsets:
        """Return memory for a table of so many numbers, instead of the last; nothing is under way."""
        ...

    def start(self, num_rows: int, max_bytes: int, by_engine: bool) -> None:
        """Begin to copy what the first 3 * `num_rows` cells say, [3, num_rows]: source, bytes, target.

        Args:
            max_bytes: Bytes of the longest row.
            by_engine: Whether the copy engines copy, and not the kernel.

        Raises:
            RuntimeError: the device refuses.
        """
        ...

    def wait(self) -> None:
        """Wait for the end, without the interpreter. Raises RuntimeError if the copy failed."""
        ...


class DeviceAccess(Protocol):
    """One device, from the process that owns its memory. Any thread; making things may take seconds."""

    def make_stream(self) -> CopyStream:
        """Return a stream of its own."""
        ...

    def pinned(self, num_bytes: int) -> memoryview:
        """Return host memory that the device reaches, contiguous, format B."""
        ...
