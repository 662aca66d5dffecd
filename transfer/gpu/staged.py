"""Batches of a GPU's memory over a transport that reaches host memory alone: by way of pinned memory of ours.

A batch is cut into parts. While one is on the wire the next is copied between the GPU and its room. The
peer's side may be either kind of memory; what of it is a GPU's its owner stages (`staging.py`). This is
for peers on other hosts: on one host `cuda_ipc` has nothing between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from base.errors import TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.gpu.launcher import NUM_ROWS, Launcher
from transfer.owned.device_access import DeviceAccess
from transfer.owned.segment import Segment
from transfer.transport import Transport
from transfer.turns import Turns

PART_BYTES = 8 << 20
"""Two frames of tcp's for each of its connections."""
NUM_ROOMS = 4
"""Parts under way on one GPU, of all batches."""
PARTS_AT_ONCE = 2
"""Of one batch."""


class StagedTransport(Transport):
    """Owns the rooms, and what copies to them; the carrier belongs to somebody else. The event loop's."""

    def __init__(self, carrier: Transport, register: Callable[[memoryview], Segment]) -> None:
        """`register`: makes a segment of host memory that the carrier can carry."""
        self._carrier = carrier
        self._register = register
        self._halls: dict[int, asyncio.Task[_Hall]] = {}
        self._is_closed = False

    @property
    def name(self) -> str:
        return f"staged_{self._carrier.name}"

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if device is None:
            return "our memory is the host's"
        return self._carrier.refusal_or_none(peer, segment_id, None)

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        hall = await self._opened(pieces.segment)
        parts = deque(pieces.grouped(PART_BYTES, NUM_ROWS))

        async def carry_in_turn() -> None:
            try:
                while parts:
                    await self._carry(hall, peer, grant, parts.popleft(), priority)
            except BaseException:
                # The other ends with the part that it has.
                parts.clear()
                raise

        # Not a group of tasks: where one has failed, that hides a cancellation.
        carrying = [carry_in_turn() for _ in range(min(PARTS_AT_ONCE, len(parts)))]
        for error in await asyncio.gather(*carrying, return_exceptions=True):
            if error is not None:
                raise error

    async def close(self) -> None:
        self._is_closed = True
        for hall in await asyncio.gather(*self._halls.values(), return_exceptions=True):
            if isinstance(hall, _Hall):
                hall.launcher.close()
        self._halls.clear()

    async def _carry(
        self, hall: _Hall, peer: PeerDescriptor, grant: Grant, part: Pieces, priority: Priority
    ) -> None:
        if not hall.turns.take():
            await hall.turns.wait(priority)
        room = hall.rooms.pop()
        lengths = part.lengths
        places = lengths.cumsum() - lengths
        inside = Pieces(part.segment, np.stack((part.offsets, lengths, places)))
        outside = Pieces(room, np.stack((places, lengths, part.peer_offsets)))
        try:
            if grant.operation is Operation.WRITE:
                await _copy(hall, grant.operation, inside, room, priority)
                await self._carrier.move(peer, grant, outside, priority)
            else:
                await self._carrier.move(peer, grant, outside, priority)
                await _copy(hall, grant.operation, inside, room, priority)
        finally:
            hall.rooms.append(room)
            hall.turns.give_back()

    async def _opened(self, ours: Segment) -> _Hall:
        """Return the rooms beside our memory's device. Making them takes seconds, and not the loop's."""
        device, access = ours.device, ours.access
        if device is None or access is None:
            raise TransferFailedError("our memory is the host's")
        if self._is_closed:
            raise TransferFailedError("this process is stopping")
        opening = self._halls.get(device)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = self._halls[device] = asyncio.create_task(self._open(access))
        return await asyncio.shield(opening)

    async def _open(self, access: DeviceAccess) -> _Hall:
        loop = asyncio.get_running_loop()
        try:
            memory = await asyncio.to_thread(access.pinned, NUM_ROOMS * PART_BYTES)
            launcher = await asyncio.to_thread(Launcher, access.make_stream, loop)
        except RuntimeError as error:
            raise TransferFailedError(f"no way between the GPU and host memory: {error}") from error
        rooms = [memory[at : at + PART_BYTES] for at in range(0, len(memory), PART_BYTES)]
        return _Hall(launcher, [self._register(room) for room in rooms])


class _Hall:
    """Where the parts of one GPU's batches wait: rooms, those who want one, and what copies."""

    def __init__(self, launcher: Launcher, rooms: list[Segment]) -> None:
        self.launcher = launcher
        self.rooms = rooms
        self.turns = Turns(len(rooms))


async def _copy(hall: _Hall, operation: Operation, inside: Pieces, room: Segment, priority: Priority) -> None:
    try:
        await hall.launcher.copy(operation, inside, room.address, True, priority)
    except RuntimeError as error:
        raise TransferFailedError(f"the GPU gave up: {error}") from error
