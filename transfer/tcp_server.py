"""The side of the tcp transport that is asked: one listening port, one gate.

Every range of a frame is checked against the grants before the first byte of its
payload is received; a payload that was refused, or whose grant ends while it comes in,
goes to a sink, and the peer is told why.
"""

from __future__ import annotations

import errno
import logging
import os
import socket

from base.errors import ProtocolError, ServeError, StaleError
from base.grants import Operation
from base.logs import event
from transfer.frame import Header, Kind, pack, pack_refusal, unpack_ranges
from transfer.holdings import Holdings
from transfer.reactor import READABLE, Reactor
from transfer.stream import FrameStream, Incoming
from transfer.tcp_socket import tune

MAX_CONNECTIONS = 1024
"""Of all peers; more are closed at once."""
MAX_READS = 64
"""Answers waiting on one connection; our clients keep to fewer."""

log = logging.getLogger(__name__)


class TcpServer:
    """Owns the listening socket and the connections of peers. Runs on the reactor's thread."""

    def __init__(self, host: str, port: int, epoch: int, holdings: Holdings, reactor: Reactor) -> None:
        self._epoch = epoch
        self._holdings = holdings
        self._reactor = reactor
        self._links: set[_ServerLink] = set()
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        # Given up for a moment when descriptors run out, to take a connection and close it:
        # left waiting, it would wake the reactor for ever.
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        host_there, port_there = self._listener.getsockname()[:2]
        self.address = f"{host_there}:{port_there}"
        reactor.post(lambda: reactor.watch(self._listener.fileno(), READABLE, self._on_ready))

    def detach(self, generation: int) -> None:
        """Leave the memory of an ended grant alone."""
        for link in list(self._links):
            link.detach(generation)

    def close(self) -> None:
        """End every connection."""
        self._reactor.forget(self._listener.fileno())
        self._listener.close()
        os.close(self._spare_fd)
        for link in list(self._links):
            link.close("this process is stopping")

    def forget(self, link: _ServerLink) -> None:
        self._links.discard(link)

    def _on_ready(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        if len(self._links) >= MAX_CONNECTIONS:
            event(log, "tcp connection refused", level=logging.WARNING, limit=MAX_CONNECTIONS)
            sock.close()
            return
        tune(sock)
        self._links.add(_ServerLink(sock, self._epoch, self._holdings, self._reactor, self))

    def _turn_away(self) -> None:
        event(log, "tcp connection refused", level=logging.ERROR, reason="no file descriptor is left")
        os.close(self._spare_fd)
        try:
            self._listener.accept()[0].close()
        except OSError:
            event(log, "tcp connection was gone already")
        finally:
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _ServerLink:
    """One connection of a peer. Owns its stream; nothing is served before its HELLO."""

    def __init__(
        self, sock: socket.socket, epoch: int, holdings: Holdings, reactor: Reactor, server: TcpServer
    ) -> None:
        self._epoch = epoch
        self._holdings = holdings
        self._server = server
        self._greeted = False
        self._stream = FrameStream(sock, reactor, self)

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        if self._greeted == (header.kind is Kind.HELLO):
            raise ProtocolError(f"a connection does not go on with {header.kind.name}")
        if header.kind is Kind.WRITE:
            return self._begin_write(header, table)
        if header.kind is Kind.READ:
            return self._begin_read(header, table)
        if header.kind in (Kind.HELLO, Kind.PING):
            return Incoming()
        raise ProtocolError(f"only a server sends {header.kind.name}")

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        if header.kind is Kind.HELLO:
            self._greet(header)
        elif incoming.detached:
            error = incoming.error or self._why_ended(header)
            self._stream.send(pack_refusal(header.frame_id, error))
        elif header.kind is Kind.READ:
            head = pack(Header(Kind.DATA, header.frame_id, header.num_bytes))
            self._stream.send(head, incoming.answer, header.generation, header.frame_id)
        else:
            self._stream.send(pack(Header(Kind.ACK, header.frame_id)))

    def on_closed(self, reason: str) -> None:
        self._server.forget(self)

    def detach(self, generation: int) -> None:
        for frame_id in self._stream.detach(generation):
            self._stream.send(pack_refusal(frame_id, StaleError("the grant was revoked")))

    def close(self, reason: str) -> None:
        self._stream.close(reason)

    def _greet(self, header: Header) -> None:
        if header.segment_id != self._epoch:
            self._stream.send(pack_refusal(0, StaleError("the peer was restarted: it has another epoch")))
            return
        self._greeted = True
        self._stream.send(pack(Header(Kind.WELCOME, generation=self._epoch)))

    def _begin_write(self, header: Header, table: memoryview) -> Incoming:
        ranges = unpack_ranges(header, table)
        try:
            views = self._holdings.views(header.segment_id, header.generation, Operation.WRITE, ranges)
        except ServeError as error:
            return Incoming(detached=True, error=error)
        return Incoming(views, header.generation)

    def _begin_read(self, header: Header, table: memoryview) -> Incoming:
        ranges = unpack_ranges(header, table)
        if self._stream.num_outgoing > MAX_READS:
            raise ProtocolError("too many reads at once")
        try:
            views = self._holdings.views(header.segment_id, header.generation, Operation.READ, ranges)
        except ServeError as error:
            return Incoming(detached=True, error=error)
        return Incoming(answer=views)

    def _why_ended(self, header: Header) -> ServeError:
        try:
            self._holdings.grants.require_live(header.generation)
        except ServeError as error:
            return error
        return StaleError("the grant was revoked")
