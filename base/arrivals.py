"""How many connections a listener has, and which makes room: the one that has asked nothing for longest.

    came ----> idle --begun--> busy --ended--> idle ...      gone: from either

Anybody may open connections and say nothing. Each holds a descriptor, and a process that has none left
serves nobody, so a listener has a part of them, and a new connection gets its place from the oldest idle one.
Where TLS is spoken a connection counts from the first packet on, not from the end of its handshake.
Handshakes begin when their peers have spoken, a few in each turn of the event loop: 800 at once held it for
0.3 s.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from base.clock import SystemClock
from base.seldom import Seldom
from base.turns import TurnBudget

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 8192
"""Connections of one listener at most, where the process may have so many descriptors."""
ACCEPT_PAUSE_S = 0.1
"""Pause after descriptors ran out and no connection could be accepted."""
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


class _Handshake(asyncio.Protocol):
    """A socket whose TLS handshake is under way; at its end the connection gets `make`'s protocol."""

    def __init__(
        self, accepted: socket.socket, make: Callable[[], asyncio.Protocol], arrivals: OpenConnections
    ) -> None:
        self.socket = accepted
        self.has_ended = False
        self._make = make
        self._arrivals = arrivals

    def abort(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.has_ended = True
        self._arrivals.gone(self)  # what is made takes the place
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class TlsListener:
    """Takes connections from a listening socket, and makes `make`'s protocol of each whose handshake ended.

    Each is a socket of ours until then, which `create_server` does not give: its factory sees no transport
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
            handshake = _Handshake(accepted, self._make, self._arrivals)
            shaking = loop.create_task(self._shake_hands(handshake, peer))
            self._shaking.add(shaking)
            shaking.add_done_callback(self._shaking.discard)
            await self._turn(ACCEPT_UNITS)

    async def _shake_hands(self, handshake: _Handshake, peer: str) -> None:
        self._arrivals.came(handshake)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _spoken(handshake.socket)
                await self._turn(HANDSHAKE_UNITS)
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: handshake, handshake.socket, ssl=self._secured()
                )
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                # The peer hears nothing of it but what TLS itself sends.
                self._arrivals.seldom.event("tls handshake failed", str(error), peer=peer, reason=error)
        finally:
            self._arrivals.gone(handshake)
            if not handshake.has_ended:
                handshake.socket.close()

    async def _turn(self, units: int) -> None:
        if not self._turns.take(units):
            await self._turns.later(units)


async def _spoken(accepted: socket.socket) -> None:
    """Return when there is something to read, or the peer is gone."""
    loop, has_come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, has_come.set)
    try:
        await has_come.wait()
    finally:
        loop.remove_reader(accepted)
