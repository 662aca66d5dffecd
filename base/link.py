"""One connection between a node and a conductor, as messages of bytes: each after its length.

    length (4 bytes, little-endian)   message   length   message   ...

What arrives is handed over in the turn of the event loop that read it, and what is sent is written in the
turn that sends it: no task, no thread and no queue is between the socket and either end. Of what is long, all
links of a listener hand over so much in a turn, and the rest in the next: a socket that was not read for a
while gives a dozen messages at once.

Weighed and left: a stream of gRPC's, which carried the same messages. Each costs it some 0.1 ms and wakes a
thread that waits for the interpreter, on both sides (bench/results/conductor_live.md).
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from base.arrivals import HANDSHAKE_TIMEOUT_S, OpenConnections, TlsListener, num_allowed
from base.errors import ForeignPeerError, ProtocolError, ServeError
from base.turns import TurnBudget

LENGTH_BYTES = 4
MAX_FIRST_BYTES = 64 << 10
"""Size limit of the first message, before anything is known of who sends it."""
MAX_MESSAGE_BYTES = 64 << 20
FREE_BYTES = 4 << 10
"""Data of at most this size, read at once, are handed over in the same turn and not counted."""
TURN_BYTES = 16 << 10
"""The tokens of 50 sequences with 20 likely ones beside each; a longer message has a turn of its own."""
SHARE_OF_DESCRIPTORS = 0.25
"""Share of the process's descriptors for a listener of nodes."""
EARLY_S = 0.002
"""How early a timer of an event loop may fire, by the clock that its callback reads."""

_FOREIGN = (
    (re.compile(rb"\x00..\x04.\x00\x00\x00\x00", re.DOTALL), "HTTP/2, as a gRPC port does"),
    (re.compile(rb"HTTP/1\.|[A-Z]+ "), "HTTP/1.1"),
    (re.compile(rb"[\x15\x16]\x03"), "TLS"),
    (re.compile(rb"SSH-"), "SSH"),
)
"""First bytes of other protocols: each is an impossible length here."""


class MessageStream(Protocol):
    """A connection that is open, as the end that uses it sees it."""

    @property
    def is_choked(self) -> bool:
        """Whether the other side does not read: `End.writable` says when it has."""
        ...

    @property
    def peer_uris(self) -> tuple[str, ...]:
        """URIs among the names in the certificate that the other side proved to have."""
        ...

    def send(self, message: bytes) -> None:
        """Write `message`; never waits. After the end nothing is written."""
        ...

    def close(self, error: Exception | None = None) -> None:
        """Close when what was sent is written. `End.closed` gets `error`, unless it was called before."""
        ...


class End(Protocol):
    """One side's use of its link. Called by the event loop."""

    def opened(self, link: MessageStream) -> None: ...

    def received(self, message: bytes) -> None:
        """Take a message in; a ServeError, or a bug, ends the link."""
        ...

    def writable(self) -> None: ...

    def closed(self, error: Exception | None) -> None:
        """Take note, once, that the link is over. None: one of the sides closed it."""
        ...


class TcpMessageStream(asyncio.Protocol):
    """A `MessageStream` over TCP, with or without TLS."""

    def __init__(
        self, end: End, arrivals: OpenConnections | None = None, turns: TurnBudget | None = None
    ) -> None:
        """Begin. `arrivals` and `turns`: of the listener that took it; None: it was dialled."""
        self._end = end
        self._turns = turns or TurnBudget(TURN_BYTES)
        self._is_waiting = False
        """Whether messages in `_partial` wait for a turn, in which nothing is read."""
        self._arrivals = arrivals
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()
        self._wanted_bytes = LENGTH_BYTES
        """Bytes at which `_partial` has a message, or the length of one, in it."""
        self._max_bytes = MAX_FIRST_BYTES
        self._is_choked = self._is_over = False

    @property
    def is_choked(self) -> bool:
        return self._is_choked

    @property
    def peer_uris(self) -> tuple[str, ...]:
        assert self._transport is not None
        certificate = self._transport.get_extra_info("peercert") or {}
        return tuple(name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI")

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def close(self, error: Exception | None = None) -> None:
        if self._transport is not None:
            if self._is_choked:
                self._transport.abort()  # who does not read would keep it open for ever
            else:
                self._transport.close()
        self._ended(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._end.opened(self)
        if self._arrivals is not None:
            self._arrivals.came(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
            if self._is_waiting or len(self._partial) < self._wanted_bytes:
                return
            data = bytes(self._partial)
            self._partial.clear()
        self._take_in(data, 0)

    def _take_in(self, data: bytes, free_bytes: int) -> None:
        """Hand over the messages in `data`; `free_bytes` of them have their turn."""
        at, self._wanted_bytes = 0, LENGTH_BYTES
        if len(data) <= FREE_BYTES:
            free_bytes = FREE_BYTES
        while len(data) - at >= LENGTH_BYTES and not self._is_over:
            begin = at + LENGTH_BYTES
            end = begin + int.from_bytes(data[at:begin], "little")
            if end - begin > self._max_bytes:
                self.close(_oversized(data[at:], self._max_bytes))
                return
            if end > len(data):
                self._wanted_bytes = end - at
                break
            if end > free_bytes and not self._turns.take(end - at):
                self._wait(end - at)
                break
            self._deliver(data[begin:end])
            at = end
        self._partial += data[at:]

    def _wait(self, num_bytes: int) -> None:
        """Read nothing until a turn has room for the next message."""
        assert self._transport is not None
        self._is_waiting = True
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._turns.later(num_bytes).add_done_callback(lambda _: self._go_on(num_bytes))

    def _go_on(self, num_bytes: int) -> None:
        if self._is_over or self._transport is None:
            return
        self._is_waiting = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        data = bytes(self._partial)
        self._partial.clear()
        is_done = False
        try:
            self._take_in(data, num_bytes)
            is_done = True
        finally:
            if not is_done:
                # A bug, for which the transport ends only what it has just read: the rest of `data` is lost.
                self._transport.abort()

    def pause_writing(self) -> None:
        self._is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        self._end.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._arrivals is not None and self._transport is not None:
            self._arrivals.gone(self._transport)
        self._ended(exc)

    def _deliver(self, message: bytes) -> None:
        if self._arrivals is not None and self._max_bytes == MAX_FIRST_BYTES and self._transport is not None:
            self._arrivals.begun(self._transport)
        self._max_bytes = MAX_MESSAGE_BYTES
        try:
            self._end.received(message)
        except ServeError as error:
            self.close(error)

    def _ended(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._end.closed(error)


def _oversized(data: bytes, max_bytes: int) -> ServeError:
    """Return why the message that `data` begins is not read: another protocol, or a length out of bounds."""
    for begins, protocol in _FOREIGN:
        if begins.match(data):
            return ForeignPeerError(f"the other side speaks {protocol}")
    num_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    return ProtocolError(f"a message of {num_bytes} bytes, of at most {max_bytes}")


async def dial(end: End, address: str, secured: Callable[[], ssl.SSLContext] | None = None) -> None:
    """Connect to `address`, host:port; `end` has the link then. Raises OSError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    await asyncio.get_running_loop().create_connection(
        lambda: TcpMessageStream(end),
        host,
        int(port),
        ssl=secured() if secured else None,
        server_hostname=host if secured else None,
        ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if secured else None,
    )


async def listen(
    make_end: Callable[[], End], listener: socket.socket, secured: Callable[[], ssl.SSLContext] | None
) -> asyncio.Server | TlsListener:
    """Take connections; each has an end of its own. Who has sent no message makes room for others."""
    arrivals, turns = OpenConnections(num_allowed(SHARE_OF_DESCRIPTORS)), TurnBudget(TURN_BYTES)

    def make() -> asyncio.Protocol:
        return TcpMessageStream(make_end(), arrivals, turns)

    if secured is not None:
        return TlsListener(make, listener, secured, arrivals)
    return await asyncio.get_running_loop().create_server(make, sock=listener)
