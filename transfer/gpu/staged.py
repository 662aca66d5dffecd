"""Batches of a GPU's memory over a transport that reaches host memory alone: by way of pinned memory of ours.

A batch is cut into parts. While one is on the wire the next is copied between the GPU and its buffer. The
peer's side may be either kind of memory; what of it is a GPU's its owner stages (`staging.py`). This is
for peers on other hosts: on one host `cuda_ipc` has nothing between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from base.errors import TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from base.together import together
from transfer.batch import Pieces, Priority
from transfer.gpu.launcher import NUM_ROWS, Launcher
from transfer.owned.device_access import DeviceAccess
from transfer.owned.segment import Segment
from transfer.priority_pool import PriorityPool
from transfer.transport import STAGED, Transport

PART_BYTES = 8 << 20
"""Two frames of tcp's for each of its connections."""
NUM_BUFFERS = 4
"""Parts under way on one GPU, of all batches."""
PARTS_AT_ONCE = 2
"""Parts of one batch under way."""


class StagedTransport(Transport):
    """Owns the buffers, and what copies to them; the carrier is not its own. The event loop calls it."""

    def __init__(self, carrier: Transport, register: Callable[[memoryview], Segment]) -> None:
        """`register`: makes a segment of host memory that the carrier can carry."""
        self._carrier = carrier
        self._register = register
        self._bays: dict[int, asyncio.Task[_Bay]] = {}
        self._is_closed = False

    @property
    def name(self) -> str:
        return STAGED + self._carrier.name

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if device is None:
            return "our memory is the host's"
        return self._carrier.refusal_or_none(peer, segment_id, None)

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        bay = await self._opened(pieces.segment)
        parts = deque(pieces.grouped(PART_BYTES, NUM_ROWS))

        async def carry_in_turn() -> None:
            while parts:
                await self._carry(bay, peer, grant, parts.popleft(), priority)

        await together(carry_in_turn() for _ in range(min(PARTS_AT_ONCE, len(parts))))

    async def close(self) -> None:
        self._is_closed = True
        for bay in await asyncio.gather(*self._bays.values(), return_exceptions=True):
            if isinstance(bay, _Bay):
                bay.launcher.close()
        self._bays.clear()

    async def _carry(
        self, bay: _Bay, peer: PeerDescriptor, grant: Grant, part: Pieces, priority: Priority
    ) -> None:
        buffer = await bay.buffers.take(priority)
        lengths = part.lengths
        places = lengths.cumsum() - lengths
        inside = Pieces(part.segment, np.stack((part.offsets, lengths, places)))
        outside = Pieces(buffer, np.stack((places, lengths, part.peer_offsets)))
        try:
            if grant.operation is Operation.WRITE:
                await _copy(bay, grant.operation, inside, buffer, priority)
                await self._carrier.move(peer, grant, outside, priority)
            else:
                await self._carrier.move(peer, grant, outside, priority)
                await _copy(bay, grant.operation, inside, buffer, priority)
        finally:
            bay.buffers.give_back(buffer)

    async def _opened(self, ours: Segment) -> _Bay:
        """Return the buffers of our memory's device. Making them takes seconds, and not the loop's."""
        device, access = ours.device, ours.access
        if device is None or access is None:
            raise TransferFailedError("our memory is the host's")
        if self._is_closed:
            raise TransferFailedError("this process is stopping")
        opening = self._bays.get(device)
        if opening is None:
            opening = self._bays[device] = asyncio.create_task(self._open(access))
            opening.add_done_callback(partial(self._forget_failed, device))
        try:
            return await asyncio.shield(opening)
        finally:
            del opening  # it holds the error, whose traceback holds this frame

    def _forget_failed(self, device: int, opened: asyncio.Task[_Bay]) -> None:
        if opened.cancelled() or opened.exception() is not None:
            del self._bays[device]

    async def _open(self, access: DeviceAccess) -> _Bay:
        loop = asyncio.get_running_loop()
        try:
            memory = await asyncio.to_thread(access.pinned, NUM_BUFFERS * PART_BYTES)
            launcher = await asyncio.to_thread(Launcher, access.make_stream, loop)
        except RuntimeError as error:
            raise TransferFailedError(f"no buffers between the GPU and host memory: {error}") from error
        parts = [memory[at : at + PART_BYTES] for at in range(0, len(memory), PART_BYTES)]
        return _Bay(launcher, PriorityPool(map(self._register, parts)))


@dataclass(frozen=True, slots=True)
class _Bay:
    """Buffers of one GPU, and the launcher that copies."""

    launcher: Launcher
    buffers: PriorityPool[Segment]


async def _copy(bay: _Bay, operation: Operation, inside: Pieces, buffer: Segment, priority: Priority) -> None:
    try:
        await bay.launcher.copy(operation, inside, buffer.address, True, priority)
    except RuntimeError as error:
        raise TransferFailedError(f"the GPU gave up: {error}") from error
