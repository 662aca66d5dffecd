"""The stream `Nodes.Attach` over a simulated network: what grpc gives to both of its sides.

The node's side is a channel for `AttachClient`, the conductor's a context for `AttachService`.
Messages are serialised, as they would be. Either side may learn of an end late or never.
"""

from __future__ import annotations

import asyncio
from collections import deque

import grpc

from protos import nodes_pb2 as pb
from tests.simulation.loop import PROCESS


def gone(details):
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details
    )


class Inbox:
    """What has arrived at one side, and how it ends."""

    def __init__(self):
        self._items = deque()
        self._end = None
        self._reader = None

    def put(self, item):
        self._items.append(item)
        self._wake()

    def end(self, error):
        """After what has arrived, raise `error`; None: the other side closed the stream."""
        if self._end is None:
            self._end = (error,)
            self._wake()

    async def read(self):
        while not self._items and self._end is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._items:
            return self._items.popleft()
        if self._end[0] is not None:
            raise self._end[0]
        return grpc.aio.EOF

    @property
    def has_ended(self):
        return self._end is not None

    def _wake(self):
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AttachStream:
    """One stream. `client` and `server` are processes; `serve(context)` handles it at the server."""

    def __init__(self, network, client, server, serve, trace):
        self._network, self._client, self._server, self._trace = network, client, server, trace
        self.to_client, self.to_server = Inbox(), Inbox()
        self._down = network.lane(client.name, server.name, client.context)
        self._up = network.lane(client.name, server.name, server.context)
        self._handler = None
        self._number = network.opened(self, client.name, server.name)
        self._up.send(self._accept, serve)

    # the node's side: a call of grpc.aio

    async def write(self, message):
        self._require_open(self.to_client)
        self._send(self._up, self.to_server, message, pb.NodeMessage)

    async def read(self):
        return await self.to_client.read()

    def cancel(self):
        self.to_client.end(gone("cancelled"))
        self._up.send(self._cancelled)

    # the conductor's side

    def context(self):
        return _Context(self)

    def send_down(self, message):
        self._send(self._down, self.to_client, message, pb.ConductorMessage)

    def refuse(self, code, details):
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        self._down.send(self.to_client.end, error)

    def closed(self):
        """The handler returned."""
        self._down.send(self.to_client.end, None)
        self._network.closed(self._number)

    # faults

    def cut(self, told):
        """The connection breaks, and what is under way is lost."""
        self._network.closed(self._number)
        self._up.is_cut = self._down.is_cut = True
        loop = asyncio.get_running_loop()
        if told in (None, self._client.name):
            loop.call_soon(self.to_client.end, gone("connection reset"), context=self._client.context)
        if told in (None, self._server.name):
            loop.call_soon(self._cancelled, context=self._server.context)

    def _accept(self, serve):
        self._handler = asyncio.ensure_future(serve(self))

    def _cancelled(self):
        self.to_server.end(None)
        if self._handler is not None:
            self._handler.cancel()

    def _send(self, lane, inbox, message, kind):
        self._trace("sends", PROCESS.get().name, type(message).__name__, message.ByteSize())
        lane.send(inbox.put, kind.FromString(message.SerializeToString()))

    def _require_open(self, inbox):
        if inbox.has_ended:
            raise asyncio.InvalidStateError("RPC already finished.")


class _Context:
    def __init__(self, stream):
        self._stream = stream

    async def read(self):
        return await self._stream.to_server.read()

    async def write(self, message):
        self._stream.send_down(message)

    async def abort(self, code, details):
        self._stream.refuse(code, details)
        raise grpc.aio.AbortError


class Channel:
    """What `AttachClient` dials: every call is a stream that `open_stream` makes."""

    def __init__(self, open_stream):
        self._open_stream = open_stream

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def stream_stream(self, *names, **more):
        return self._open_stream
