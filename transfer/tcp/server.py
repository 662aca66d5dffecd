"""The side of the tcp transport that is asked: one listening port, one gate.

Every range of a frame is checked against the grants before the first byte of its
payload is received; a payload that was refused, or whose grant ends while it comes in,
goes to a sink, and the peer is sent the reason.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import Protocol

from base.errors import ProtocolError, ServeError, StaleError
from base.grants import Operation
from base.logs import event
from transfer.completion import Latch
from transfer.owned.grant import NUM_SLOTS
from transfer.owned.holdings import Holdings, Staging
from transfer.owned.ranges import Offsets
from transfer.owned.segment import Segment
from transfer.tcp.frame import FrameKind, Header, pack, pack_refusal, unpack_ranges
from transfer.tcp.greeting import Nonces, PeerKey, nonce, proof, proves
from transfer.tcp.reactor import READABLE, Reactor
from transfer.tcp.sockets import limit_on_host, tune
from transfer.tcp.stream import FrameStream, Incoming

MAX_CONNECTIONS = 1024
"""Connections of all peers, in equal shares on each reactor. Beyond that the oldest that did not greet is
closed, or else the new one."""
MAX_ANSWERS = 64
"""Answers that wait on one connection for its peer to read them; our clients keep to fewer."""
MAX_HOLDS = 2 * NUM_SLOTS
"""Holds of one connection's peer; our clients keep one on each grant, and ask for a few at a time."""

log = logging.getLogger(__name__)


class OneSided(Protocol):
    """The asked side of a transport whose peers reach into memory themselves.

    Called on the threads of reactors; what concerns one link, on one of them.
    """

    def pair(self, link: object, offer: bytes) -> bytes:
        """Connect to the peer on `link`; return our half. Raises ServeError."""
        ...

    def admit(self, generation: int, digest: int) -> bytes:
        """Return what a peer needs to do what a grant allows, if it knows what that is. Raises ServeError."""
        ...

    def cut(self, link: object) -> None:
        """See that the peer on `link` reaches nothing any more, at once."""
        ...


class TcpServer:
    """Owns the listening socket, and deals connections out to reactors. Any thread may call it."""

    def __init__(
        self,
        host: str,
        port: int,
        key: PeerKey,
        holdings: Holdings,
        reactors: Sequence[Reactor],
        one_sided: OneSided | None = None,
    ) -> None:
        """Listen. `key`: of our own descriptor, which a peer has to know."""
        self.is_one_sided = one_sided is not None
        self._desks = [_Desk(key, holdings, reactor, one_sided, len(reactors)) for reactor in reactors]
        self._next = cycle(self._desks)
        self._reactor = reactors[0]
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        # Given up for a moment when descriptors run out, to take a connection and close it:
        # left waiting, it would wake the reactor for ever.
        self._spare_fd: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        host_there, port_there = self._listener.getsockname()[:2]
        self.address = f"{host_there}:{port_there}"
        self._reactor.post(lambda: self._reactor.watch(self._listener.fileno(), READABLE, self._on_ready))

    def detach(self, generation: int, done: Callable[[], None]) -> None:
        """Leave the memory of an ended grant alone; call `done` on some thread when peers do so too."""
        latch = Latch(len(self._desks), done)
        for desk in self._desks:
            desk.reactor.post(partial(desk.detach, generation, latch.count_down))

    def cut(self, generation: int) -> None:
        """Disconnect every peer that still reaches into an ended grant."""
        for desk in self._desks:
            desk.reactor.post(partial(desk.cut, generation))

    def close(self) -> None:
        """End every connection. The first of the reactors is stopped first."""
        self._reactor.post(self._stop_listening)
        for desk in self._desks:
            desk.reactor.post(desk.close)

    def _stop_listening(self) -> None:
        self._reactor.forget(self._listener.fileno())
        self._listener.close()
        self._give_up_spare()

    def _on_ready(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        desk = next(self._next)
        desk.reactor.post(partial(desk.take, sock))

    def _turn_away(self) -> None:
        event(log, "tcp connection refused", level=logging.ERROR, reason="no file descriptor is left")
        self._give_up_spare()
        # Whoever came may be gone, and the descriptor somebody else's: it is asked for the next time.
        with suppress(OSError):
            self._listener.accept()[0].close()
        with suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        if self._spare_fd is not None:
            os.close(self._spare_fd)
            self._spare_fd = None


class _Desk:
    """The connections that one reactor serves, on its thread."""

    def __init__(
        self,
        key: PeerKey,
        holdings: Holdings,
        reactor: Reactor,
        one_sided: OneSided | None,
        num_desks: int,
    ) -> None:
        self.key = key
        self.holdings = holdings
        self.reactor = reactor
        self.one_sided = one_sided
        self._num_desks = num_desks
        self._waiting: dict[int, Callable[[], None]] = {}
        self._links: dict[_ServerLink, None] = {}
        """Oldest first."""
        self._is_closed = False

    def take(self, sock: socket.socket) -> None:
        """Serve a connection, unless there are too many."""
        if self._is_closed:
            sock.close()
            return
        if len(self._links) >= MAX_CONNECTIONS // self._num_desks and not self._closed_a_silent_one():
            event(log, "tcp connection refused", level=logging.WARNING, limit=MAX_CONNECTIONS)
            sock.close()
            return
        tune(sock)
        limit_on_host(sock)
        self._links[_ServerLink(sock, self)] = None

    def detach(self, generation: int, done: Callable[[], None]) -> None:
        for link in list(self._links):
            link.detach(generation)
            if link.holds(generation):
                link.recall(generation)
        self._waiting[generation] = done
        self.let_go(generation)

    def let_go(self, generation: int) -> None:
        """Call whoever waits for the end of a grant, if no peer reaches into it any more."""
        if not any(link.holds(generation) for link in self._links):
            done = self._waiting.pop(generation, None)
            if done is not None:
                done()

    def cut(self, generation: int) -> None:
        for link in list(self._links):
            if link.holds(generation):
                link.close("it holds on to a grant that ended")

    def close(self) -> None:
        self._is_closed = True
        for link in list(self._links):
            link.close("this process is stopping")

    def forget(self, link: _ServerLink) -> None:
        """Drop a connection that is gone, and with it what its peer held."""
        if self.one_sided is not None:
            self.one_sided.cut(link)
        self._links.pop(link, None)
        for generation in list(self._waiting):
            self.let_go(generation)

    def _closed_a_silent_one(self) -> bool:
        """Disconnect whoever has not greeted for longest: anybody can fill the port with those."""
        silent = next((link for link in self._links if not link.is_greeted), None)
        if silent is not None:
            silent.close("it said nothing, and others want its place")
        return silent is not None


class _ServerLink:
    """One connection of a peer. Owns its stream; nothing is served before its PROOF."""

    def __init__(self, sock: socket.socket, desk: _Desk) -> None:
        self._desk = desk
        self._awaited: FrameKind | None = FrameKind.HELLO
        """The only frame that may come before it is greeted; None: none, because its proof was wrong."""
        self._nonces = Nonces((0, 0), nonce())
        self.is_greeted = False
        self._held: dict[int, int] = {}
        self._buffers: dict[int, Segment] = {}
        self._stream = FrameStream(sock, desk.reactor, self)

    def holds(self, generation: int) -> bool:
        """Return whether the peer may be reaching into the ranges of this grant."""
        return generation in self._held.values()

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        kind = header.kind
        if self._stream.num_outgoing > MAX_ANSWERS:
            raise ProtocolError("too many answers are waiting")
        if not self.is_greeted:
            if kind is not self._awaited:
                raise ProtocolError(f"a connection does not begin with {kind.name}")
            return Incoming()
        operation = _OPERATIONS.get(kind)
        if operation is not None:
            return self._checked(header, table, operation)
        if kind is FrameKind.PAIR:
            return Incoming([memoryview(bytearray(header.num_bytes))] if header.num_bytes else [])
        if kind in (FrameKind.HOLD, FrameKind.LET_GO):
            return Incoming()
        raise ProtocolError(f"a connection does not go on with {kind.name}")

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        if incoming.detached:
            error = incoming.error or self._why_ended(header)
            self._stream.send(pack_refusal(header.frame_id, error))
        elif header.kind is FrameKind.WRITE:
            self._stream.send(_landed(header, incoming.arrived))
        elif header.kind is FrameKind.HELLO:
            self._greet(header)
        elif header.kind is FrameKind.PROOF:
            self._welcome(header)
        elif header.kind is FrameKind.READ:
            head = pack(Header(FrameKind.DATA, header.frame_id, header.num_bytes))
            self._stream.send(head, incoming.answer, header.generation, header.frame_id)
        else:
            self._serve_one_sided(header, b"".join(incoming.views))

    def on_closed(self, reason: str) -> None:
        self._held.clear()
        self._desk.forget(self)

    def detach(self, generation: int) -> None:
        for frame_id in self._stream.detach(generation):
            self._stream.send(pack_refusal(frame_id, StaleError("the grant was revoked")))

    def recall(self, generation: int) -> None:
        """Ask the peer to let go of a grant that ended."""
        self._stream.send(pack(Header(FrameKind.RECALL, generation=generation)))

    def close(self, reason: str) -> None:
        self._stream.close(reason)

    def _greet(self, header: Header) -> None:
        self._awaited = FrameKind.PROOF
        self._nonces = self._nonces._replace(asker=(header.generation, header.offset))
        generation, offset = self._nonces.owner
        self._stream.send(pack(Header(FrameKind.CHALLENGE, generation=generation, offset=offset)))

    def _welcome(self, header: Header) -> None:
        if not proves(header, *self._desk.key, self._nonces):
            # The answer does not show an outsider whether the epoch was right.
            self._awaited = None
            self._stream.send(pack_refusal(0, StaleError("this is not the process of that descriptor")))
            return
        self.is_greeted = True
        self._stream.send(pack(proof(FrameKind.WELCOME, *self._desk.key, self._nonces)))

    def _checked(self, header: Header, table: memoryview, operation: Operation) -> Incoming:
        holdings, ranges = self._desk.holdings, unpack_ranges(header, table)
        staging = holdings.staging.get(header.segment_id)
        try:
            if staging is not None:
                holdings.grants.check(header.segment_id, header.generation, operation, *ranges)
                return self._staged(header, *ranges, staging)
            views = holdings.views(header.segment_id, header.generation, operation, *ranges)
        except ServeError as error:
            return Incoming(detached=True, error=error.with_traceback(None))
        is_write = operation is Operation.WRITE
        return Incoming(views, header.generation) if is_write else Incoming(answer=views)

    def _staged(self, header: Header, offsets: Offsets, lengths: Offsets, staging: Staging) -> Incoming:
        """Return where a payload goes, or comes from, whose place is memory of a GPU. Raises ServeError."""
        if header.kind is FrameKind.READ:
            return Incoming(answer=(staging.fetched(offsets, lengths),))
        # A connection has one frame coming in at a time.
        buffer = self._buffers.get(header.segment_id)
        if buffer is None:
            buffer = self._buffers[header.segment_id] = staging.buffer()
        arrived = partial(staging.put, buffer, offsets, lengths)
        return Incoming((buffer.memory[: header.num_bytes],), header.generation, arrived=arrived)

    def _serve_one_sided(self, header: Header, offer: bytes) -> None:
        one_sided = self._desk.one_sided
        if one_sided is None:
            raise ProtocolError("nothing but tcp is offered here")
        if header.kind is FrameKind.LET_GO:
            generation = self._held.pop(header.offset, None)
            if generation is not None:
                self._desk.let_go(generation)
            return
        if header.kind is FrameKind.HOLD and (header.frame_id in self._held or len(self._held) == MAX_HOLDS):
            # Taken for another, the earlier one would be let go of by nobody.
            raise ProtocolError("this is held already, or there are too many")
        try:
            if header.kind is FrameKind.PAIR:
                answer = one_sided.pair(self, offer)
            else:
                answer = one_sided.admit(header.generation, header.offset)
                self._held[header.frame_id] = header.generation
        except ServeError as error:
            self._stream.send(pack_refusal(header.frame_id, error))
        else:
            head = pack(Header(FrameKind.DATA, header.frame_id, len(answer)))
            self._stream.send(head, [memoryview(answer)])

    def _why_ended(self, header: Header) -> ServeError:
        try:
            self._desk.holdings.grants.require_live(header.generation)
        except ServeError as error:
            return error.with_traceback(None)
        return StaleError("the grant was revoked")


def _landed(header: Header, arrived: Callable[[], None] | None) -> bytes:
    """Do with a payload what is to be done; return the frame that answers it."""
    try:
        if arrived is not None:
            arrived()
    except ServeError as error:
        return pack_refusal(header.frame_id, error)
    return pack(Header(FrameKind.ACK, header.frame_id))


_OPERATIONS = {FrameKind.WRITE: Operation.WRITE, FrameKind.READ: Operation.READ}
