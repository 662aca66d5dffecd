"""How many connections a listener has, and which makes room: the one that has asked nothing for longest.

    came ----> idle --begun--> busy --ended--> idle ...      gone: from either

Anybody may open connections and say nothing. Each holds a descriptor, and a process that has none left
serves nobody, so a listener has a part of them, and a new connection gets its place from the oldest idle one.
Where TLS is spoken a connection counts from the first packet on, not from the end of its handshake.
Handshakes begin when their peers have spoken, and each part of what these say in them is read in a turn of
the event loop that has room for it: 800 at once held it for 0.3 s, whether they came together or began with a
byte and went on together.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast

from base.clock import SystemClock
from base.seldom import Seldom
from base.turns import TurnBudget

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 8192
"""Connections of one listener at most, where the process may have so many descriptors."""
ACCEPT_PAUSE_S = 0.1
"""Pause after descriptors ran out and no connection could be accepted."""
HELLO_BYTES = 4096
"""The most that is read of a handshake at once. Most are said in two parts, which are shorter."""
ACCEPT_UNITS = 20
HANDSHAKE_UNITS = 200
"""Shares of a turn's `TURN_UNITS`: a key of 4,096 bits signs for 10 times as long as a curve's."""


def num_allowed(share: float) -> int:
    """Return how many connections a listener may have whose share of the process's descriptors this is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else int(soft * share)
    return max(1, min(MAX_CONNECTIONS, most))


class Connection(Protocol):
    """A connection that can be ended: a transport, or a handshake under way."""

    def abort(self) -> None: ...


class OpenConnections:
    """The connections of one listener. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seldom = Seldom(log, SystemClock())
        self._idle: dict[Connection, None] = {}
        """Connections that are idle, the one that has been for longest first."""
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def came(self, connection: Connection) -> None:
        """Count a connection; the oldest idle one ends where there are too many, itself if all are busy."""
        self._idle[connection] = None
        if len(self) > self.limit:
            oldest = next(iter(self._idle))
            self.seldom.event("idle connection ended for another", "", limit=self.limit)
            self.gone(oldest)
            oldest.abort()

    def begun(self, connection: Connection) -> None:
        """Take note that it asks something, and keeps its place."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def ended(self, connection: Connection) -> None:
        """Take note that it was answered."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def gone(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._busy.discard(connection)


class _Handshake(asyncio.BufferedProtocol):
    """A connection whose TLS handshake is under way: it reads for TLS, each part in a turn that has room."""

    def __init__(self, turns: TurnBudget) -> None:
        self.transport: asyncio.Transport
        self.has_spoken = asyncio.Event()
        """Set when there is something to begin with, or its peer is gone."""
        self._turns = turns
        self._buffer = memoryview(bytearray(HELLO_BYTES))
        self._num_bytes = 0
        """Bytes of the buffer that TLS has not read yet; meanwhile no more are."""
        self._tls: asyncio.BufferedProtocol | None = None

    def abort(self) -> None:
        self.transport.abort()

    def begin(self, tls: asyncio.BufferedProtocol) -> None:
        """Read for `tls`, to which the transport was given just now: it learns of that before it reads."""
        self._tls = tls
        self.transport.set_protocol(self)
        asyncio.get_running_loop().call_soon(self._pass)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._num_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self._num_bytes += nbytes
        self.transport.pause_reading()
        self.has_spoken.set()
        if self._tls is None:
            return
        if self._turns.take(HANDSHAKE_UNITS):
            self._pass()
        else:
            self._turns.later(HANDSHAKE_UNITS).add_done_callback(self._pass)

    def eof_received(self) -> bool | None:
        self.has_spoken.set()
        return self._tls.eof_received() if self._tls is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_spoken.set()
        if self._tls is not None:  # which may learn in this turn that it has the transport
            asyncio.get_running_loop().call_soon(self._tls.connection_lost, exc)

    def _pass(self, _: object = None) -> None:
        said, self._num_bytes = self._buffer[: self._num_bytes], 0
        if self.transport.is_closing() or self._tls is None:
            return
        self.transport.resume_reading()
        while said:
            into = memoryview(self._tls.get_buffer(len(said)))[: len(said)]
            into[:] = said[: len(into)]
            self._tls.buffer_updated(len(into))
            said = said[len(into) :]


class _Early(asyncio.Protocol):
    """Bytes that came with the end of a handshake, before the protocol was made that they are for."""

    def __init__(self) -> None:
        self.said = bytearray()

    def data_received(self, data: bytes) -> None:
        self.said += data


class TlsListener:
    """Takes connections from a listening socket, and makes `make`'s protocol of each whose handshake ended.

    Until then each has a protocol of ours, which `create_server` does not give: its factory sees no transport
    before the handshake has ended.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        listener: socket.socket,
        secured: Callable[[], ssl.SSLContext],
        arrivals: OpenConnections,
    ) -> None:
        """Begin to accept. `close` it; the event loop is the one that runs.

        `secured` makes the context of a handshake that begins.
        """
        self._make = make
        self._listener = listener
        self._secured = secured
        self._arrivals = arrivals
        listener.setblocking(False)
        self._turns = TurnBudget()
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept nobody any more; who is through the handshake goes on."""
        self._accepting.cancel()
        for shaking in self._shaking:
            shaking.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (peer, *_) = await loop.sock_accept(self._listener)
            except OSError as error:
                self._arrivals.seldom.event("nobody accepted", "", reason=error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            shaking = loop.create_task(self._shake_hands(accepted, peer))
            self._shaking.add(shaking)
            shaking.add_done_callback(self._shaking.discard)
            await self._turn(ACCEPT_UNITS)

    async def _shake_hands(self, accepted: socket.socket, peer: str) -> None:
        loop, handshake = asyncio.get_running_loop(), _Handshake(self._turns)
        await loop.connect_accepted_socket(lambda: handshake, accepted)
        self._arrivals.came(handshake)
        secured: asyncio.Transport | None = None
        early = _Early()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await handshake.has_spoken.wait()
                await self._turn(HANDSHAKE_UNITS)
                secured = await self._secure(handshake, early)
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                # The peer hears nothing of it but what TLS itself sends.
                self._arrivals.seldom.event("tls handshake failed", str(error), peer=peer, reason=error)
        finally:
            self._arrivals.gone(handshake)
            if secured is None:
                handshake.abort()
        if secured is not None:
            self._begin(secured, bytes(early.said))

    def _begin(self, secured: asyncio.Transport, said: bytes) -> None:
        """Make the protocol of a connection, which takes the place, and loses it if it fails."""
        protocol = self._make()
        secured.set_protocol(protocol)
        try:
            protocol.connection_made(secured)
            if said:
                protocol.data_received(said)
        except BaseException:
            secured.abort()
            raise

    async def _secure(self, handshake: _Handshake, early: asyncio.Protocol) -> asyncio.Transport | None:
        """Return the transport of a handshake that has ended; None: its peer is gone."""
        transport = handshake.transport
        if transport.is_closing():
            return None
        loop, limit_s = asyncio.get_running_loop(), HANDSHAKE_TIMEOUT_S
        securing = loop.create_task(
            loop.start_tls(transport, early, self._secured(), server_side=True, ssl_handshake_timeout=limit_s)
        )
        try:
            await asyncio.sleep(0)  # it has given TLS the transport
            tls = cast(asyncio.BufferedProtocol, transport.get_protocol())
            handshake.begin(tls)
            secured = await securing
        finally:
            securing.cancel()
        if transport.is_closing():
            return None
        transport.set_protocol(tls)
        return secured

    async def _turn(self, units: int) -> None:
        if not self._turns.take(units):
            await self._turns.later(units)
