"""One connection to a peer, from the asking side: connect, greet, keep frames in flight.

    connecting  --connected-->  greeting  --WELCOME-->  open
         any  --refused, lost, closed-->  closed          (for ever; a new link replaces it)

A frame that was handed in ends exactly once, with or without an error, whatever happens
to the connection.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from base.errors import ProtocolError, ServeError, StaleError, TransferFailedError
from base.grants import Grant, Operation
from transfer.batch import Piece, Priority
from transfer.frame import Header, Kind, pack, refusal_error
from transfer.reactor import WRITABLE, Poller
from transfer.stream import FrameStream, Incoming
from transfer.tcp_socket import tune

MAX_IN_FLIGHT = 8
"""Frames sent and not answered: 32 MiB, more than a 100 Gb/s link holds in 2 ms."""


class LinkState(Enum):
    """Where a link is in its life."""

    CONNECTING = 1
    GREETING = 2
    OPEN = 3
    CLOSED = 4


class FrameOwner(Protocol):
    """The batch that a frame is part of. Any thread."""

    def frame_ended(self, error: ServeError | None) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Some pieces of one batch, small enough for one frame on the wire."""

    owner: FrameOwner
    grant: Grant
    pieces: Sequence[Piece]
    priority: Priority
    num_bytes: int

    @property
    def views(self) -> list[memoryview]:
        return [piece.memory for piece in self.pieces]

    def head(self, frame_id: int) -> bytes:
        """Return its header and table."""
        kind = Kind.WRITE if self.grant.operation is Operation.WRITE else Kind.READ
        header = Header(kind, frame_id, self.num_bytes, self.grant.segment_id, self.grant.generation)
        return pack(header, [(piece.peer_offset, piece.length) for piece in self.pieces])


class TcpLink:
    """Owns one outgoing connection. Everything but `state` is the poller's thread's."""

    def __init__(self, address: str, epoch: int, poller: Poller) -> None:
        self.state = LinkState.CONNECTING
        self._address = address
        self._epoch = epoch
        self._poller = poller
        self._urgent: deque[Frame] = deque()
        self._background: deque[Frame] = deque()
        self._in_flight: dict[int, Frame] = {}
        self._next_id = 1
        self._sock: socket.socket | None = None
        self._stream: FrameStream | None = None
        self._error: ServeError = TransferFailedError("not connected")

    def connect(self) -> None:
        """Begin to connect; frames may be submitted from now on."""
        host, _, port = self._address.rpartition(":")
        try:
            self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            tune(self._sock)
            code = self._sock.connect_ex((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            self._fail(TransferFailedError(f"cannot connect to {self._address}: {error}"))
            return
        if code not in (0, errno.EINPROGRESS):
            self._fail(TransferFailedError(f"cannot connect to {self._address}: {os.strerror(code)}"))
            return
        self._poller.watch(self._sock.fileno(), WRITABLE, self._on_connected)

    def submit(self, frames: Sequence[Frame]) -> None:
        """Take frames over. Each ends through its owner."""
        for frame in frames:
            (self._urgent if frame.priority is Priority.FOREGROUND else self._background).append(frame)
        if self.state is LinkState.CLOSED:
            self._fail(self._error)
        elif self.state is LinkState.OPEN:
            self._fill()

    def detach(self, owner: FrameOwner) -> None:
        """Leave the batch's memory alone and end its frames."""
        if self._stream is not None:
            self._stream.detach(owner)
        mine = [frame for frame in self._in_flight.values() if frame.owner is owner]
        self._in_flight = {key: frame for key, frame in self._in_flight.items() if frame.owner is not owner}
        for queue in (self._urgent, self._background):
            kept = [frame for frame in queue if frame.owner is not owner]
            mine += [frame for frame in queue if frame.owner is owner]
            queue.clear()
            queue.extend(kept)
        for _ in mine:
            owner.frame_ended(TransferFailedError("cancelled"))
        if self.state is LinkState.OPEN:
            self._fill()

    def close(self) -> None:
        """End the connection and every frame."""
        self._fail(TransferFailedError("this process is stopping"))

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        if header.kind is Kind.REFUSED:
            return Incoming([memoryview(bytearray(header.num_bytes))] if header.num_bytes else [])
        if header.kind is Kind.DATA:
            frame = self._in_flight.get(header.frame_id)
            if frame is None or frame.grant.operation is not Operation.READ:
                # The answer to a read that was cancelled.
                return Incoming(detached=True)
            return Incoming(frame.views, frame.owner)
        if header.kind is (Kind.WELCOME if self.state is LinkState.GREETING else Kind.ACK):
            return Incoming()
        raise ProtocolError(f"{header.kind.name} does not follow")

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        if header.kind is Kind.REFUSED:
            self._refused(header, b"".join(incoming.views))
        elif header.kind is Kind.WELCOME:
            self.state = LinkState.OPEN
            self._fill()
        else:
            self._answered(header.frame_id, None)

    def on_closed(self, reason: str) -> None:
        self._fail(TransferFailedError(f"{self._address}: {reason}"))

    def _on_connected(self, events: int) -> None:
        sock = self._sock
        if sock is None:
            return
        self._poller.forget(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(TransferFailedError(f"cannot connect to {self._address}: {os.strerror(code)}"))
            return
        self.state = LinkState.GREETING
        self._stream = FrameStream(sock, self._poller, self)
        self._stream.send(pack(Header(Kind.HELLO, segment_id=self._epoch)))

    def _refused(self, header: Header, reason: bytes) -> None:
        error = refusal_error(header, reason)
        if self.state is LinkState.GREETING:
            self._fail(error if isinstance(error, StaleError) else TransferFailedError(str(error)))
        else:
            self._answered(header.frame_id, error)

    def _answered(self, frame_id: int, error: ServeError | None) -> None:
        frame = self._in_flight.pop(frame_id, None)
        if frame is not None:
            frame.owner.frame_ended(error)
        self._fill()

    def _fill(self) -> None:
        while len(self._in_flight) < MAX_IN_FLIGHT and (self._urgent or self._background):
            if self._stream is None:
                return
            frame = (self._urgent or self._background).popleft()
            frame_id = self._next_id
            self._next_id += 1
            self._in_flight[frame_id] = frame
            is_write = frame.grant.operation is Operation.WRITE
            self._stream.send(frame.head(frame_id), frame.views if is_write else (), frame.owner, frame_id)

    def _fail(self, error: ServeError) -> None:
        # The first reason is the true one; closing the stream brings another.
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CLOSED
            self._error = error
        stream, self._stream = self._stream, None
        sock, self._sock = self._sock, None
        frames = [*self._in_flight.values(), *self._urgent, *self._background]
        for owned in (self._in_flight, self._urgent, self._background):
            owned.clear()
        if stream is not None:
            stream.close(str(error))
        elif sock is not None:
            self._poller.forget(sock.fileno())
            sock.close()
        for frame in frames:
            frame.owner.frame_ended(self._error)
