"""One connection to a peer, from the asking side: connect, greet, keep frames in flight.

    connecting  --connected-->  greeting  --CHALLENGE, WELCOME-->  open
         any  --refused, lost, closed-->  closed          (for ever; a new link replaces it)

A frame that was handed in ends exactly once, with or without an error, whatever happens
to the connection.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from base.errors import ProtocolError, ServeError, StaleError, TransferFailedError
from base.grants import Grant, Operation
from transfer.batch import Pieces, Priority
from transfer.completion import Completion
from transfer.tcp.frame import FrameKind, Header, pack, refusal_error, table_of
from transfer.tcp.greeting import Nonces, PeerKey, nonce, proof, proves
from transfer.tcp.reactor import WRITABLE, Poller
from transfer.tcp.sockets import limit_on_host, tune
from transfer.tcp.stream import FrameStream, Incoming

MAX_IN_FLIGHT = 4
"""Frames sent and not answered: 16 MiB, which a 100 Gb/s link carries in 1.3 ms. Urgent frames wait
behind them."""


_ANSWERS = (FrameKind.ACK, FrameKind.DATA, FrameKind.REFUSED)
_GREETING = (FrameKind.CHALLENGE, FrameKind.WELCOME)


class LinkState(Enum):
    """Where a link is in its life."""

    CONNECTING = 1
    GREETING = 2
    OPEN = 3
    CLOSED = 4


class FrameOwner(Protocol):
    """The batch that a frame is part of. Any thread."""

    def end(self, error: ServeError | None) -> None:
        """Note that the frame is over: nothing touches its memory any more."""
        ...


@dataclass(slots=True, eq=False)
class Frame:
    """A request that is sent as one frame, and the memory for its answer's payload."""

    owner: FrameOwner
    kind: FrameKind
    segment_id: int = 0
    generation: int = 0
    offset: int = 0
    """Where the first range begins in the peer's segment."""
    table: bytes = b""
    """The ranges, if there are several."""
    num_bytes: int = 0
    outgoing: Sequence[memoryview] = ()
    incoming: Sequence[memoryview] = ()
    is_urgent: bool = True
    frame_id: int = 0
    """Set when it is sent."""

    def head(self) -> bytes:
        """Return its header and table."""
        segment_id, generation, offset = self.segment_id, self.generation, self.offset
        header = Header(self.kind, self.frame_id, self.num_bytes, segment_id, generation, offset)
        return pack(header, self.table)


def frame_of(owner: FrameOwner, grant: Grant, pieces: Pieces, priority: Priority) -> Frame:
    """Return the frame that moves these pieces."""
    if pieces.only is not None:
        offset, peer_offset, length = pieces.only
        views, table = [pieces.segment.memory[offset : offset + length]], b""
    else:
        views, peer_offset = pieces.views(), int(pieces.peer_offsets[0])
        table = table_of(pieces.peer_offsets, pieces.lengths)
    is_write = grant.operation is Operation.WRITE
    return Frame(
        owner,
        FrameKind.WRITE if is_write else FrameKind.READ,
        grant.segment_id,
        grant.generation,
        peer_offset,
        table,
        pieces.num_bytes,
        views if is_write else (),
        () if is_write else views,
        priority is Priority.FOREGROUND,
    )


class ClientLink:
    """Owns one outgoing connection. Everything but `state` is the poller's thread's."""

    def __init__(
        self,
        address: str,
        key: PeerKey,
        poller: Poller,
        on_closed: Callable[[], None] = lambda: None,
        on_recalled: Callable[[int], None] = lambda generation: None,
    ) -> None:
        self.state = LinkState.CONNECTING
        self._when_closed = on_closed
        self._on_recalled = on_recalled
        self._address = address
        self._key = key
        self._nonces = Nonces(nonce(), (0, 0))
        self._poller = poller
        self._urgent: deque[Frame] = deque()
        self._background: deque[Frame] = deque()
        self._in_flight: dict[int, Frame] = {}
        self._next_id = 1
        self._sock: socket.socket | None = None
        self._stream: FrameStream | None = None
        self._error: ServeError = TransferFailedError("not connected")

    @property
    def is_closed(self) -> bool:
        return self.state is LinkState.CLOSED

    def connect(self) -> None:
        """Begin to connect; frames may be submitted from now on.

        Where that is out of the question, `on_closed` is called within this call.
        """
        host, _, port = self._address.rpartition(":")
        try:
            self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            tune(self._sock)
            code = self._sock.connect_ex((host, int(port)))
        except (OSError, ValueError, OverflowError, TypeError) as error:
            # A peer's word is no host's name where it has a zero in it: TypeError.
            self._not_connected(str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._not_connected(os.strerror(code))
            return
        self._poller.watch(self._sock.fileno(), WRITABLE, self._on_connected)

    def submit(self, frames: Sequence[Frame]) -> None:
        """Take frames over. Each ends through its owner."""
        for frame in frames:
            (self._urgent if frame.is_urgent else self._background).append(frame)
        if self.state is LinkState.OPEN:
            self._fill()
        elif self.state is LinkState.CLOSED:
            self._fail(self._error)

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
            owner.end(TransferFailedError("cancelled"))
        if self.state is LinkState.OPEN:
            self._fill()

    def let_go(self, hold: Frame) -> None:
        """Notify the peer that what was held is not touched any more."""
        if self._stream is not None and hold.frame_id:
            self._stream.send(pack(Header(FrameKind.LET_GO, offset=hold.frame_id)))

    def close(self) -> None:
        """End the connection and every frame."""
        self._fail(TransferFailedError("this process is stopping"))

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        stream = self._stream
        if stream is not None and header.kind in _ANSWERS and stream.is_sending(header.frame_id):
            # Its batch would end while the memory is read.
            raise ProtocolError("an answer to what has not been said yet")
        if header.kind is FrameKind.REFUSED:
            return Incoming([memoryview(bytearray(header.num_bytes))] if header.num_bytes else ())
        if header.kind is FrameKind.DATA:
            frame = self._in_flight.get(header.frame_id)
            if frame is None:
                # The answer to a read that was cancelled.
                return Incoming(detached=True)
            return Incoming(frame.incoming, frame.owner)
        if header.kind is FrameKind.RECALL:
            return Incoming()
        if header.kind in (_GREETING if self.state is LinkState.GREETING else (FrameKind.ACK,)):
            return Incoming()
        raise ProtocolError(f"{header.kind.name} does not follow")

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        if header.kind is FrameKind.REFUSED:
            self._refused(header, b"".join(incoming.views))
        elif header.kind is FrameKind.CHALLENGE:
            self._prove(header)
        elif header.kind is FrameKind.WELCOME:
            if not proves(header, *self._key, self._nonces):
                raise ProtocolError("who listens there does not know the secret of the peer's descriptor")
            self.state = LinkState.OPEN
            self._fill()
        elif header.kind is FrameKind.RECALL:
            self._on_recalled(header.generation)
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
            self._not_connected(os.strerror(code))
            return
        limit_on_host(sock)
        self.state = LinkState.GREETING
        self._stream = FrameStream(sock, self._poller, self)
        generation, offset = self._nonces.asker
        self._stream.send(pack(Header(FrameKind.HELLO, generation=generation, offset=offset)))

    def _not_connected(self, reason: str) -> None:
        self._fail(TransferFailedError(f"cannot connect to {self._address}: {reason}"))

    def _prove(self, header: Header) -> None:
        if self._stream is not None:
            self._nonces = Nonces(self._nonces.asker, (header.generation, header.offset))
            self._stream.send(pack(proof(FrameKind.PROOF, *self._key, self._nonces)))

    def _refused(self, header: Header, reason: bytes) -> None:
        error = refusal_error(header, reason)
        if self.state is LinkState.GREETING:
            self._fail(error if isinstance(error, StaleError) else TransferFailedError(str(error)))
        else:
            self._answered(header.frame_id, error)

    def _answered(self, frame_id: int, error: ServeError | None) -> None:
        frame = self._in_flight.pop(frame_id, None)
        if frame is not None:
            frame.owner.end(error)
        self._fill()

    def _fill(self) -> None:
        in_flight = self._in_flight
        while (queue := self._urgent or self._background) and len(in_flight) < MAX_IN_FLIGHT:
            if self._stream is None:
                return
            frame = queue.popleft()
            frame_id = frame.frame_id = self._next_id
            self._next_id = frame_id + 1
            in_flight[frame_id] = frame
            self._stream.send(frame.head(), frame.outgoing, frame.owner, frame_id)

    def _fail(self, error: ServeError) -> None:
        # The first reason is the true one; closing the stream brings another.
        is_first = self.state is not LinkState.CLOSED
        if is_first:
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
            # Each its own: who raises one holds the link, which would hold it.
            frame.owner.end(copy(self._error))
        if is_first:
            self._when_closed()


class Call:
    """One frame to a peer and its answer, on a link of the event loop's own."""

    def __init__(self, kind: FrameKind, answer_bytes: int) -> None:
        self._completion = Completion()
        self._answer = bytearray(answer_bytes)
        self.frame = Frame(self._completion, kind, incoming=[memoryview(self._answer)])

    async def answered(self, link: ClientLink) -> bytes:
        """Send it and return the answer; raises what the peer refused it with."""
        link.submit((self.frame,))
        await self._completion.wait(lambda: link.detach(self._completion))
        return bytes(self._answer)
