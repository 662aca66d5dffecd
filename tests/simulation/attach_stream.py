"""The link between a node and a conductor over a simulated network: `base.link.MessageStream` at both ends.

Messages are bytes, as they would be. Either side may learn of an end late or never.
"""

from __future__ import annotations

import asyncio

from base.errors import ServeError
from tests.simulation.loop import PROCESS


class Side:
    """One end's link."""

    is_choked = False
    hurt = staticmethod(lambda message: message)
    """Return what is sent in place of a message."""
    peer_uris = ()

    def __init__(self, stream, lane):
        self._stream, self._lane = stream, lane
        self.end = self.other = None
        self._is_over = False

    def send(self, message):
        if not self._is_over:
            message = self.hurt(message)
            self._stream.trace("sends", PROCESS.get().name, "bytes", len(message))
            self._lane.send(self.other.arrive, message)

    def close(self, error=None):
        if not self._is_over:
            self._lane.send(self.other.ended, None)
            self.ended(error)

    def arrive(self, message):
        if not self._is_over:
            try:
                self.end.received(message)
            except ServeError as error:
                self.close(error)

    def ended(self, error):
        if not self._is_over:
            self._is_over = True
            self._stream.ended()
            if self.end is not None:
                self.end.closed(error)


class AttachStream:
    """One connection. `client` and `server` are processes; `make_end()` is called at the server."""

    def __init__(self, network, client, server, make_end, trace):
        self._network, self._client, self._server, self.trace = network, client, server, trace
        self._up = network.lane(client.name, server.name, server.context)
        self._down = network.lane(client.name, server.name, client.context)
        self.of_client, self.of_server = Side(self, self._up), Side(self, self._down)
        self.of_client.other, self.of_server.other = self.of_server, self.of_client
        self._number = network.opened(self, client.name, server.name)
        self._up.send(self._accept, make_end)

    def open(self, end, hurt):
        """Be `end`'s link, at the node; what it sends is `hurt`."""
        self.of_client.hurt = hurt
        self.of_client.end = end
        end.opened(self.of_client)

    def ended(self):
        self._network.closed(self._number)

    def cut(self, told):
        """The connection breaks, and what is under way is lost."""
        self._network.closed(self._number)
        self._up.is_cut = self._down.is_cut = True
        loop = asyncio.get_running_loop()
        for process, side in ((self._client, self.of_client), (self._server, self.of_server)):
            if told in (None, process.name):
                error = ConnectionResetError("connection reset")
                loop.call_soon(side.ended, error, context=process.context)

    def _accept(self, make_end):
        self.of_server.end = make_end()
        self.of_server.end.opened(self.of_server)
