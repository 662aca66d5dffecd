"""The tcp transport, from the asking side: batches over several connections to each peer.

A batch is cut into frames, the frames go to the links in turn, and the batch ends when
each of them has. The first error takes back the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from base.errors import ServeError, TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Piece, Priority, split_pieces
from transfer.frame import MAX_FRAME_BYTES, MAX_RANGES
from transfer.reactor import Reactor
from transfer.settled import settled
from transfer.tcp_link import Frame, LinkState, TcpLink


class TcpTransport:
    """Owns the connections to peers. The event loop calls it; reactors run the links."""

    name = "tcp"

    def __init__(self, reactors: Sequence[Reactor], connections: int) -> None:
        self._reactors = reactors
        self._connections = connections
        self._peers: dict[str, _Peer] = {}

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int) -> str | None:
        return None if peer.address_or_none(self.name) else "the peer does not offer it"

    async def move(
        self, peer: PeerDescriptor, grant: Grant, pieces: Sequence[Piece], priority: Priority
    ) -> None:
        links = self._connected(peer).links
        groups = split_pieces(pieces, MAX_FRAME_BYTES, MAX_RANGES)
        batch = _Batch(len(groups))
        frames = [
            Frame(batch, grant, group, priority, sum(piece.length for piece in group)) for group in groups
        ]
        for index, link in enumerate(links[: len(frames)]):
            link.submit(batch, frames[index :: len(links)])
        await settled(batch.ended, batch.cancel)

    async def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _connected(self, peer: PeerDescriptor) -> _Peer:
        known = self._peers.get(peer.node_id)
        if known is not None and known.epoch == peer.epoch:
            known.replace_closed()
            return known
        if known is not None:
            known.close()
        address = peer.address_or_none(self.name)
        if address is None:
            raise TransferFailedError(f"{peer.node_id} has no tcp endpoint")
        fresh = _Peer(address, peer.epoch, self._reactors, self._connections)
        self._peers[peer.node_id] = fresh
        return fresh


class _Peer:
    """The links to one epoch of one peer. The event loop's."""

    def __init__(self, address: str, epoch: int, reactors: Sequence[Reactor], connections: int) -> None:
        self.epoch = epoch
        self._address = address
        self._reactors = reactors
        self._turn = 0
        self._links = [self._open(index) for index in range(connections)]

    @property
    def links(self) -> list[_RemoteLink]:
        """The links, beginning with the one whose turn it is."""
        self._turn = (self._turn + 1) % len(self._links)
        return self._links[self._turn :] + self._links[: self._turn]

    def replace_closed(self) -> None:
        for index, link in enumerate(self._links):
            if link.is_closed:
                self._links[index] = self._open(index)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _open(self, index: int) -> _RemoteLink:
        return _RemoteLink(self._address, self.epoch, self._reactors[index % len(self._reactors)])


class _RemoteLink:
    """A link, called from outside its reactor's thread."""

    def __init__(self, address: str, epoch: int, reactor: Reactor) -> None:
        self._reactor = reactor
        self._link = TcpLink(address, epoch, reactor)
        reactor.post(self._link.connect)

    @property
    def is_closed(self) -> bool:
        return self._link.state is LinkState.CLOSED

    def submit(self, batch: _Batch, frames: Sequence[Frame]) -> None:
        batch.links.append(self)
        self._reactor.post(lambda: self._link.submit(frames))

    def detach(self, batch: _Batch) -> None:
        self._reactor.post(lambda: self._link.detach(batch))

    def close(self) -> None:
        self._reactor.post(self._link.close)


class _Batch:
    """Counts the frames of one batch down, from the threads of several reactors."""

    def __init__(self, num_frames: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left = num_frames
        self._error: ServeError | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.links: list[_RemoteLink] = []

    def frame_ended(self, error: ServeError | None) -> None:
        with self._lock:
            self._left -= 1
            is_first = error is not None and self._error is None
            if is_first:
                self._error = error
            is_last = self._left == 0
        # A loop that was closed without closing us has nobody who waits.
        with contextlib.suppress(RuntimeError):
            if is_last:
                self._loop.call_soon_threadsafe(self._end)
            elif is_first:
                self._loop.call_soon_threadsafe(self.cancel)

    def cancel(self) -> None:
        for link in self.links:
            link.detach(self)

    def _end(self) -> None:
        if self._error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._error)
