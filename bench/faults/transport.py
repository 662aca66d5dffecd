"""A transport that misbehaves on command, for the tests of everything above it.

It stands between the router and a real transport and does to chosen batches what
networks, NICs and peers have been seen to do. What a fault claims to the caller is part
of it: SILENT ones report success, and only a checksum made at the source and checked at
the sink finds them.

    FLIP       one bit of the bytes differs                            silent
    TRUNCATE   at most the first half of the bytes arrives             silent
    DROP       nothing arrives                                         silent
    MISPLACE   two pieces (or halves) arrive in each other's place     silent
    DUPLICATE  everything arrives twice                                harmless
    REORDER    pieces arrive last first                                harmless
    FAIL       half arrives, then the connection breaks                raises
    LATE       raises at once; arrives when `deliver_late` is called   raises
    DELAY      waits for `gate` before it begins                       slow
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from base.errors import ServeError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.owned import segment as segments
from transfer.transport import Transport


class Fault(Enum):
    """The ways in which one batch can be hurt; the head of the file explains each."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    DROP = "drop"
    MISPLACE = "misplace"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    FAIL = "fail"
    LATE = "late"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class _LateMove:
    peer: PeerDescriptor
    grant: Grant
    pieces: Pieces


class FaultyTransport:
    """A transport, and for each batch the fault that `choose` returns, or none."""

    def __init__(self, inner: Transport, choose: Callable[[], Fault | None]) -> None:
        self._inner = inner
        self._choose = choose
        self._late: list[_LateMove] = []
        self.gate = asyncio.Event()

    @property
    def name(self) -> str:
        return self._inner.name

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        return self._inner.refusal_or_none(peer, segment_id, device)

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        fault = self._choose()
        if fault is Fault.DELAY:
            await self.gate.wait()
        if fault is Fault.LATE:
            self._late.append(_LateMove(peer, grant, copied(pieces)))
            raise TransferFailedError("injected: no answer")
        if fault is Fault.FLIP and grant.operation is Operation.WRITE:
            pieces = copied(pieces)
            flip_bit(pieces)
        await self._move_some(peer, grant, _arriving(fault, pieces), priority)
        if fault is Fault.FLIP and grant.operation is Operation.READ:
            flip_bit(pieces)
        if fault is Fault.DUPLICATE:
            await self._move_some(peer, grant, pieces, priority)
        if fault is Fault.FAIL:
            raise TransferFailedError("injected: the connection broke")

    async def deliver_late(self) -> list[ServeError | None]:
        """Carry out the late batches, long after their callers heard that they failed.

        Returns what each came to: the error that refused it, or None if it went through.
        """
        outcomes: list[ServeError | None] = []
        late, self._late = self._late, []
        for each in late:
            try:
                await self._inner.move(each.peer, each.grant, each.pieces, Priority.FOREGROUND)
            except ServeError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        return outcomes

    async def close(self) -> None:
        await self._inner.close()

    async def _move_some(
        self, peer: PeerDescriptor, grant: Grant, pieces: Pieces | None, priority: Priority
    ) -> None:
        if pieces is not None:
            await self._inner.move(peer, grant, pieces, priority)


def copied(pieces: Pieces) -> Pieces:
    """Return the same pieces over a private copy of their bytes."""
    memory = bytearray().join(pieces.views())
    starts = pieces.lengths.cumsum() - pieces.lengths
    return Pieces(segments.over(0, memory), np.stack((starts, pieces.lengths, pieces.peer_offsets)))


def flip_bit(pieces: Pieces) -> None:
    """Change the lowest bit in the middle of the first piece."""
    first = pieces.views()[0]
    first[len(first) // 2] ^= 1


def _arriving(fault: Fault | None, pieces: Pieces) -> Pieces | None:
    if fault is Fault.DROP:
        return None
    if fault in (Fault.TRUNCATE, Fault.FAIL):
        return _first_half(pieces)
    if fault is Fault.REORDER:
        return Pieces(pieces.segment, pieces.numbers[:, ::-1])
    if fault is Fault.MISPLACE:
        return _misplaced(pieces)
    return pieces


def _misplaced(pieces: Pieces) -> Pieces:
    """Exchange the beginnings of two pieces, or the halves of the only one."""
    if len(pieces) == 1:
        pieces = pieces.cut(-(-pieces.num_bytes // 2))
    length = int(pieces.lengths[:2].min())
    numbers = pieces.numbers.copy()
    numbers[2, :2] = pieces.peer_offsets[1::-1]
    # What the longer of the two has more stays where it is.
    numbers[1, :2] = length
    return Pieces(pieces.segment, numbers)


def _first_half(pieces: Pieces) -> Pieces | None:
    half = pieces.num_bytes // 2
    return pieces.grouped(half, len(pieces) + 1)[0] if half else None
