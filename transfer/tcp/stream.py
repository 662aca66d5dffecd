"""One socket as a stream of frames, in both directions, with no copy of a payload.

Payloads are received straight into the memory that the header was allowed to touch, and
sent straight from where they lie. Each payload under way has an owner (a grant, a
batch); `detach(owner)` is how memory is taken back in the middle of it without waiting
for the peer and without breaking the stream:

    frame not begun, going out   dropped
    frame begun, going out       its rest is copied aside (4 MiB at most) and sent from there
    frame coming in              its rest goes to a sink
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from base.errors import ProtocolError, ServeError
from transfer.tcp.frame import HEADER_BYTES, Header, unpack_header
from transfer.tcp.reactor import READABLE, WRITABLE, Poller

_SINK_BYTES = 1 << 20
_NO_TABLE = memoryview(b"")
MAX_VECTORS = min(512, os.sysconf("SC_IOV_MAX"))


class StreamOwner(Protocol):
    """The object that gives the frames of one stream their meaning."""

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        """Return where the payload goes. Raises ProtocolError to end the connection."""
        ...

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        """Take over a frame whose payload is there (or went to the sink, if `incoming.detached`)."""
        ...

    def on_closed(self, reason: str) -> None:
        """Note that the connection is gone. Called once."""
        ...


@dataclass(slots=True)
class Incoming:
    """Where the payload of a frame goes."""

    views: Sequence[memoryview] = ()
    owner: object | None = None
    detached: bool = False
    error: ServeError | None = None
    """Why it was refused from the start."""
    answer: Sequence[memoryview] = ()
    """Memory that a READ is answered with, if it is allowed."""
    arrived: Callable[[], None] | None = None
    """Takes over a payload that is whole. Raises ServeError."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    frame_id: int
    views: deque[memoryview]
    owner: object | None
    begun: bool = False


class FrameStream:
    """Owns one connected non-blocking socket. Everything runs on the poller's thread."""

    def __init__(self, sock: socket.socket, poller: Poller, owner: StreamOwner) -> None:
        self._sock = sock
        self._poller = poller
        self._owner = owner
        self._outgoing: deque[_Outgoing] = deque()
        self._wants_write = False
        self._is_open = True
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._header: Header | None = None
        self._table = _NO_TABLE
        self._incoming: Incoming | None = None
        self._missing: deque[memoryview] = deque([self._head])
        self._sink: memoryview | None = None
        self._sink_left = 0
        poller.watch(sock.fileno(), READABLE, self._on_ready)

    @property
    def num_outgoing(self) -> int:
        return len(self._outgoing)

    def is_sending(self, frame_id: int) -> bool:
        """Return whether some of a frame has still to go out, from the memory that it was given with."""
        return bool(self._outgoing) and any(each.frame_id == frame_id for each in self._outgoing)

    def send(
        self,
        head: bytes,
        views: Sequence[memoryview] = (),
        owner: object | None = None,
        frame_id: int = 0,
    ) -> None:
        """Queue a frame. The memory is read until the frame is out or `owner` is detached."""
        if not self._is_open:
            return
        parts = deque([memoryview(head), *views])
        self._outgoing.append(_Outgoing(frame_id, parts, owner))
        if not self._wants_write:
            self._send_some()

    def detach(self, owner: object) -> list[int]:
        """Leave the owner's memory alone from here on; return the ids of dropped frames."""
        dropped = []
        for outgoing in [each for each in self._outgoing if each.owner == owner]:
            if not outgoing.begun:
                self._outgoing.remove(outgoing)
                dropped.append(outgoing.frame_id)
            else:
                outgoing.views = deque([memoryview(b"".join(outgoing.views))])
                outgoing.owner = None
        incoming = self._incoming
        if incoming is not None and incoming.owner == owner and self._missing:
            self._sink_rest(incoming)
        return dropped

    def close(self, reason: str) -> None:
        """End the connection; what is under way is lost."""
        if self._is_open:
            self._is_open = False
            self._poller.forget(self._sock.fileno())
            self._sock.close()
            self._outgoing.clear()
            self._missing.clear()
            self._incoming = None
            self._owner.on_closed(reason)

    def _on_ready(self, events: int) -> None:
        if events & WRITABLE and self._is_open:
            self._send_some()
        if events & ~WRITABLE and self._is_open:
            self._receive_frame()

    def _send_some(self) -> None:
        try:
            while self._outgoing:
                self._send_once()
        except BlockingIOError:
            self._want_write(True)
        except OSError as error:
            self.close(f"sending failed: {error}")
        else:
            self._want_write(False)

    def _send_once(self) -> None:
        outgoing = self._outgoing[0]
        outgoing.begun = True
        # Header and payload in one call: a peer that sleeps would be woken twice.
        _advance_views(outgoing.views, self._sock.sendmsg(list(islice(outgoing.views, MAX_VECTORS))))
        if not outgoing.views:
            self._outgoing.popleft()

    def _want_write(self, wants: bool) -> None:
        if wants != self._wants_write and self._is_open:
            self._wants_write = wants
            events = READABLE | WRITABLE if wants else READABLE
            self._poller.watch(self._sock.fileno(), events, self._on_ready)

    def _receive_frame(self) -> None:
        """Receive what is there of one frame; the next one's turn comes after other sockets'."""
        try:
            while True:
                while self._sink_left or self._missing:
                    if not self._receive_once():
                        self.close("the peer closed the connection")
                        return
                if self._ends_frame():
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"receiving failed: {error}")
        except ProtocolError as error:
            self.close(str(error))
        except BaseException as error:
            # Foreseen by nobody: no memory, a driver's fault. Half a frame is in, so the connection ends.
            self.close(f"{type(error).__name__}: {error}")
            raise

    def _receive_once(self) -> int:
        if self._sink_left:
            count = self._sock.recv_into(self._sink_memory()[: self._sink_left])
            self._sink_left -= count
        else:
            count = self._sock.recvmsg_into(list(islice(self._missing, MAX_VECTORS)))[0]
            _advance_views(self._missing, count)
        return count

    def _ends_frame(self) -> bool:
        """Go on to the table or the payload once what was awaited is there; return whether that was all."""
        header = self._header
        if header is None:
            header = self._header = unpack_header(self._head)
            if header.num_ranges > 1:
                self._table = memoryview(bytearray(header.table_bytes))
                self._missing.append(self._table)
                return False
            self._table = _NO_TABLE
        incoming = self._incoming
        if incoming is None:
            incoming = self._begin_payload(header)
            if self._sink_left or self._missing:
                return False
        self._header = self._incoming = None
        self._missing.append(self._head)
        self._owner.on_frame(header, incoming)
        return True

    def _begin_payload(self, header: Header) -> Incoming:
        incoming = self._owner.on_header(header, self._table)
        num_bytes, views = header.payload_bytes, incoming.views
        if sum(view.nbytes for view in views) == num_bytes:
            self._missing.extend(views)
        elif incoming.detached:
            self._sink_left = num_bytes
        else:
            raise ProtocolError(f"a payload of {num_bytes} bytes was not expected")
        self._incoming = incoming
        return incoming

    def _sink_rest(self, incoming: Incoming) -> None:
        self._sink_left = sum(view.nbytes for view in self._missing)
        self._missing.clear()
        incoming.views = ()
        incoming.detached = True

    def _sink_memory(self) -> memoryview:
        if self._sink is None:
            self._sink = memoryview(bytearray(_SINK_BYTES))
        return self._sink


def _advance_views(views: deque[memoryview], count: int) -> None:
    """Take the first `count` bytes off."""
    while views and count >= views[0].nbytes:
        count -= views.popleft().nbytes
    if count:
        views[0] = views[0][count:]
