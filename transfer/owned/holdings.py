"""The segments of this process, the grants on them, and the board that shows both.

The event loop changes it; transports look into it from their threads through `views`,
which is the one gate that bytes from a wire pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from base.clock import Clock
from base.errors import ProtocolError, StaleError
from base.grants import Grant, Operation
from transfer.owned import segment as segments
from transfer.owned.board import Board, digest_of
from transfer.owned.device_access import DeviceAccess
from transfer.owned.grant import GrantState, GrantTable
from transfer.owned.ranges import Offsets
from transfer.owned.segment import DeviceMemory, Segment


class Staging(Protocol):
    """Copies between the wire and one segment that is a GPU's memory, by way of host memory."""

    def buffer(self) -> Segment:
        """Return host memory for the payload of one frame; raises TransferFailedError if none is left."""
        ...

    def put(self, buffer: Segment, offsets: Offsets, lengths: Offsets) -> None:
        """Copy what lies in `buffer`, range after range, to where it belongs.

        Raises:
            ProtocolError: the ranges are not aligned as the device wants them.
            TransferFailedError: the device refuses.
        """
        ...

    def fetched(self, offsets: Offsets, lengths: Offsets) -> memoryview:
        """Return a copy of some ranges, one after the other; raises as `put`."""
        ...


class Holdings:
    """Owns segments and grants. With `board`, shared ones are open to peers of this host.

    `stage` makes the `Staging` of a GPU's memory.
    """

    def __init__(
        self,
        clock: Clock,
        board: Board | None,
        random_bits: Callable[[int], int] = secrets.randbits,
        stage: Callable[[Segment, DeviceAccess], Staging] | None = None,
    ) -> None:
        self.grants = GrantTable(clock, random_bits=random_bits)
        self._random_bits = random_bits
        self._board = board
        self._stage = stage
        self._segments: dict[int, Segment] = {}
        self.staging: dict[int, Staging] = {}
        """Staging of each segment that is a GPU's memory, by its id."""

    def allocate(self, num_bytes: int) -> Segment:
        """Return a new zeroed shared segment; raises ValueError or OSError."""
        segment = segments.allocate_shared(self._draw_id(), num_bytes)
        self._show(segment)
        self._segments[segment.segment_id] = segment
        return segment

    def register(self, memory: memoryview | bytearray) -> Segment:
        """Return a segment over existing memory; raises ValueError."""
        segment = segments.over(self._draw_id(), memory)
        self._segments[segment.segment_id] = segment
        return segment

    def register_device(self, memory: DeviceMemory, is_served: bool) -> Segment:
        """Return a segment over memory of a GPU; raises ValueError where nobody could reach it.

        Args:
            is_served: Peers may reach it over a wire. What that takes may raise RuntimeError, or
                TransferFailedError.
        """
        if self._board is None and not is_served:
            raise ValueError("nobody reaches a GPU's memory: allow tcp, or on one host shm or cuda_ipc")
        segment = segments.on_device(self._draw_id(), memory)
        try:
            staging = self._stage(segment, memory.access) if is_served and self._stage else None
        except BaseException:
            segments.release(segment)
            raise
        self._show(segment)
        if staging is not None:
            self.staging[segment.segment_id] = staging
        self._segments[segment.segment_id] = segment
        return segment

    def grant(
        self, segment: Segment, offsets: Sequence[int], length: int, operation: Operation, lease_s: float
    ) -> Grant:
        """Return a grant; raises ValueError for ranges outside, CapacityError if there are too many."""
        if self._segments.get(segment.segment_id) is not segment:
            raise ValueError("the segment is not registered here")
        starts = np.array(offsets, np.int64)
        if not len(starts) or length <= 0 or starts.min() < 0 or starts.max() > segment.num_bytes - length:
            raise ValueError("a granted range lies outside the segment, or there is none")
        grant = self.grants.issue(segment.segment_id, operation, starts, length, lease_s)
        if self._board is not None:
            self._board.post(grant)
        return grant

    def revoke(self, generation: int) -> None:
        """Refuse the grant from this moment; what is under way goes on until drained."""
        if self.grants.revoke(generation) and self._board is not None:
            self._board.close_slot(generation, GrantState.REVOKED)

    def expire(self) -> list[int]:
        """Refuse every grant whose lease ran out; return their generations."""
        due = self.grants.expire()
        if self._board is not None:
            for generation in due:
                self._board.close_slot(generation, GrantState.EXPIRED)
        return due

    def drain_board(self, generation: int, done: Callable[[], None]) -> None:
        """Call `done`, from any thread, when no peer of this host copies under an ended grant."""
        if self._board is None:
            done()
        else:
            self._board.drain(generation, done)

    def views(
        self, segment_id: int, generation: int, operation: Operation, offsets: Offsets, lengths: Offsets
    ) -> list[memoryview]:
        """Return the memory of some ranges if the grant allows all of them now.

        Any thread. Raises as `GrantTable.check` does.
        """
        self.grants.check(segment_id, generation, operation, offsets, lengths)
        segment = self.segment(segment_id)
        if segment.device is not None:
            raise ProtocolError("the segment is a GPU's memory")
        memory = segment.memory
        ranges = zip(offsets.tolist(), lengths.tolist(), strict=True)
        return [memory[offset : offset + length] for offset, length in ranges]

    def admitted(self, generation: int, digest: int) -> tuple[Segment, float]:
        """Return the segment of a live grant, and the seconds that its lease still runs.

        `digest`: what `digest_of` makes of the grant at whoever asks. Any thread. Raises as
        `GrantTable.check` does.
        """
        grant, left_s = self.grants.live(generation)
        if digest_of(grant) != digest:
            raise ProtocolError(f"grant {generation:#x} says something else")
        return self.segment(grant.segment_id), left_s

    def segment(self, segment_id: int) -> Segment:
        """Return a segment of ours; raises StaleError if there is none of that id. Any thread."""
        segment = self._segments.get(segment_id)
        if segment is None:
            raise StaleError(f"no segment {segment_id:#x}")
        return segment

    def close(self) -> None:
        """Close every segment and the board. Memory lives on while somebody maps it."""
        if self._board is not None:
            self._board.close()
        for segment in self._segments.values():
            segments.release(segment)
        self._segments.clear()

    def _show(self, segment: Segment) -> None:
        try:
            if self._board is not None:
                self._board.show(segment)
        except ValueError:
            segments.release(segment)
            raise

    def _draw_id(self) -> int:
        while True:
            segment_id = self._random_bits(64)
            if segment_id and segment_id not in self._segments:
                return segment_id
