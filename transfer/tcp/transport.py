"""The tcp transport, from the asking side: batches over several connections to each peer.

A batch is cut into frames, the frames go to the least busy links in turn, and the batch ends
when each of them has. The first error takes back the rest. Large batches travel on links
that reactors run; a small one on a link of the event loop itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from base.errors import ServeError, TransferFailedError
from base.grants import Grant, PeerDescriptor
from transfer.batch import Pieces, Priority
from transfer.completion import Completion
from transfer.tcp.frame import MAX_FRAME_BYTES, MAX_RANGES, SMALL_BYTES
from transfer.tcp.greeting import PeerKey, key_of
from transfer.tcp.host import TransferHost
from transfer.tcp.link import ClientLink, Frame, frame_of
from transfer.tcp.reactor import LoopPoller, Poller, Reactor
from transfer.transport import OfferedTransport, Transport


def offer(host: TransferHost) -> OfferedTransport:
    """Return the transport; our side of it listens."""
    server = host.listen()
    return OfferedTransport(
        TcpTransport(host.reactors, host.config.connections), server.address, is_wire=True
    )


class TcpTransport(Transport):
    """Owns the connections to peers. The event loop calls it."""

    name = "tcp"

    def __init__(self, reactors: Sequence[Reactor], connections: int) -> None:
        self._reactors = reactors
        self._connections = connections
        self._peers: dict[str, _Peer] = {}
        self._is_closed = False

    def refusal_or_none(self, peer: PeerDescriptor, segment_id: int, device: int | None) -> str | None:
        if device is not None:
            return "our memory is a GPU's"
        return None if peer.address_or_none(self.name) else "the peer does not offer it"

    async def move(self, peer: PeerDescriptor, grant: Grant, pieces: Pieces, priority: Priority) -> None:
        connected, pieces = self._connected(peer), pieces.merged()
        if pieces.num_bytes <= SMALL_BYTES and len(pieces) <= MAX_RANGES:
            groups, links = [pieces], [connected.link_of_loop()]
        else:
            groups = pieces.grouped(MAX_FRAME_BYTES, MAX_RANGES)
            links = connected.least_busy(len(groups))
        batch = _Batch(len(groups), links)
        frames = [frame_of(batch, grant, group, priority) for group in groups]
        for index, link in enumerate(links):
            link.num_batches += 1
            link.submit(frames[index :: len(links)])
        try:
            await batch.completion.wait(batch.cancel)
        finally:
            for link in links:
                link.num_batches -= 1

    async def close(self) -> None:
        self._is_closed = True
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _connected(self, peer: PeerDescriptor) -> _Peer:
        if self._is_closed:
            raise TransferFailedError("this process is stopping")
        known = self._peers.get(peer.node_id)
        if known is not None and known.key.epoch == peer.epoch:
            return known
        if known is not None:
            known.close()
        address = peer.address_or_none(self.name)
        if address is None:
            raise TransferFailedError(f"{peer.node_id} has no tcp endpoint")
        for node_id, each in list(self._peers.items()):
            if each.is_gone:
                del self._peers[node_id]
        fresh = self._peers[peer.node_id] = _Peer(address, key_of(peer), self._reactors, self._connections)
        return fresh


class _Peer:
    """The links to one epoch of one peer, opened when they are first used. The event loop's."""

    def __init__(self, address: str, key: PeerKey, reactors: Sequence[Reactor], connections: int) -> None:
        self.key = key
        self._address = address
        self._pollers = [reactors[index % len(reactors)] for index in range(connections)]
        self._bulk: list[_PeerLink] = []
        self._small: list[_PeerLink] = []

    @property
    def is_gone(self) -> bool:
        """Whether no connection is left: another batch would open one, as to a peer that is new."""
        return all(link.is_closed for link in (*self._bulk, *self._small))

    def link_of_loop(self) -> _PeerLink:
        """Return the link of the event loop."""
        if not self._small or self._small[0].is_closed:
            self._small = [_PeerLink(self._address, self.key, LoopPoller())]
        return self._small[0]

    def least_busy(self, count: int) -> list[_PeerLink]:
        """Return at most `count` links of the reactors. One batch after another finds a thread awake."""
        for index, poller in enumerate(self._pollers):
            if index == len(self._bulk) or self._bulk[index].is_closed:
                self._bulk[index : index + 1] = [_PeerLink(self._address, self.key, poller)]
        return sorted(self._bulk, key=lambda link: link.num_batches)[:count]

    def close(self) -> None:
        for link in (*self._bulk, *self._small):
            link.close()


class _PeerLink:
    """A link that a reactor or the event loop runs, called from the loop."""

    def __init__(self, address: str, key: PeerKey, poller: Poller) -> None:
        self.num_batches = 0
        """Batches under way on it."""
        self._poller = poller
        self._link = ClientLink(address, key, poller)
        poller.post(self._link.connect)

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def submit(self, frames: Sequence[Frame]) -> None:
        self._poller.post(lambda: self._link.submit(frames))

    def detach(self, batch: _Batch) -> None:
        self._poller.post(lambda: self._link.detach(batch))

    def close(self) -> None:
        self._poller.post(self._link.close)


class _Batch:
    """Counts the frames of one batch down, from the threads of several links."""

    def __init__(self, num_frames: int, links: Sequence[_PeerLink]) -> None:
        self.completion = Completion()
        self._links = links
        self._lock = threading.Lock()
        self._left = num_frames
        self._error: ServeError | None = None

    def end(self, error: ServeError | None) -> None:
        with self._lock:
            self._left -= 1
            is_first = error is not None and self._error is None
            if is_first:
                self._error = error
            is_last = self._left == 0
        if is_last:
            self.completion.end(self._error)
            self._error = None  # who raises it holds the batch
        elif is_first:
            self.completion.on_loop(self.cancel)

    def cancel(self) -> None:
        """Take the memory of every frame back."""
        for link in self._links:
            link.detach(self)
