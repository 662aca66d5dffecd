"""A transport that misbehaves on command, for the tests of everything above it.

It stands between the router and a real transport and does to chosen batches what
networks, NICs and peers have been seen to do. What a fault claims to the caller is part
of it: SILENT ones report success, and only a checksum made at the source and checked at
the sink finds them.

    FLIP       one bit of the bytes differs                            silent
    TRUNCATE   only the first half of the bytes arrives                silent
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
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from base.errors import ServeError, TransferFailedError
from base.grants import Grant, Operation, PeerDescriptor
from transfer import segment as segments
from transfer.batch import Piece, Priority
from transfer.transport import Transport


class Fault(Enum):
    """What happens to one batch; see the head of the file."""

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
    pieces: Sequence[Piece]


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

    async def move(
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
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
        """Carry out the late batches, long after their callers were told that they failed.

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
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
        if pieces:
            await self._inner.move(peer, grant, pieces, priority)


def copied(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the same pieces over a private copy of their bytes."""
    memory = bytearray().join(piece.memory for piece in pieces)
    segment = segments.over(0, memory)
    starts = itertools.accumulate((piece.length for piece in pieces), initial=0)
    return [
        Piece(segment, start, piece.peer_offset, piece.length)
        for start, piece in zip(starts, pieces, strict=False)
    ]


def flip_bit(pieces: Sequence[Piece]) -> None:
    """Change the lowest bit in the middle of the first piece."""
    pieces[0].memory[pieces[0].length // 2] ^= 1


def _arriving(fault: Fault | None, pieces: Sequence[Piece]) -> Sequence[Piece]:
    if fault is Fault.DROP:
        return []
    if fault in (Fault.TRUNCATE, Fault.FAIL):
        return _first_half(pieces)
    if fault is Fault.REORDER:
        return list(reversed(pieces))
    if fault is Fault.MISPLACE:
        return _misplaced(pieces)
    return pieces


def _misplaced(pieces: Sequence[Piece]) -> list[Piece]:
    """Exchange the beginnings of two pieces, or the halves of the only one."""
    first, rest = pieces[0], list(pieces[1:])
    if not rest:
        half = first.length // 2
        first, rest = first.part(0, half), [first.part(half, first.length - half)]
    second = rest.pop(0)
    length = min(first.length, second.length)
    swapped = [
        Piece(first.segment, first.offset, second.peer_offset, length),
        Piece(second.segment, second.offset, first.peer_offset, length),
    ]
    tails = [each.part(length, each.length - length) for each in (first, second) if each.length > length]
    return [*swapped, *tails, *rest]


def _first_half(pieces: Sequence[Piece]) -> list[Piece]:
    left = sum(piece.length for piece in pieces) // 2
    kept: list[Piece] = []
    for piece in pieces:
        length = min(left, piece.length)
        if length:
            kept.append(piece.part(0, length))
        left -= length
    return kept
