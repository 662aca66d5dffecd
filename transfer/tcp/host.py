"""The parts of a process that its transports share: configuration, memory, threads and listening port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from base.clock import Clock
from base.config import TransferConfig
from transfer.owned.holdings import Holdings
from transfer.tcp.greeting import PeerKey
from transfer.tcp.reactor import Reactor, num_reactors
from transfer.tcp.server import OneSided, TcpServer


class TransferHost:
    """Owns the reactors and, once a transport listens, the one port. The event loop calls it."""

    def __init__(self, config: TransferConfig, clock: Clock, holdings: Holdings, key: PeerKey) -> None:
        """`key`: of our own descriptor."""
        self.config = config
        self.clock = clock
        self.holdings = holdings
        self.server: TcpServer | None = None
        self.reactors: list[Reactor] = []
        self.at_end: list[Callable[[], None]] = []
        """Calls that give back what the threads use, once they have ended."""
        self._key = key

    def listen(self, one_sided: OneSided | None = None) -> TcpServer:
        """Return the server on our port, which listens from the first call on; raises OSError.

        `one_sided`: the asked side of a transport whose peers reach into memory themselves.
        """
        if self.server is None:
            count = num_reactors(self.config.connections)
            self.reactors += [Reactor(f"transfer-{number}") for number in range(count)]
            host, port = self.config.host, self.config.port
            self.server = TcpServer(host, port, self._key, self.holdings, self.reactors, one_sided)
        return self.server

    async def close(self) -> None:
        """End the connections and threads, then give back what they used."""
        if self.server is not None:
            self.server.close()
        for reactor in self.reactors:
            await asyncio.to_thread(reactor.stop)
        for give_back in self.at_end:
            give_back()
