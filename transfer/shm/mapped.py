"""The boards of peers on this host, mapped, and the means to notice that a peer ended."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

from base.errors import TransferFailedError
from base.grants import PeerDescriptor
from transfer.owned.board import PeerBoard


class MappedPeer:
    """One process whose memory is mapped here. `MappedPeers.copying` keeps it mapped."""

    def __init__(self, address: str, epoch: int) -> None:
        self.epoch = epoch
        self.num_copies = 0
        self._is_closed = False
        self.board = PeerBoard(address, epoch)
        try:
            # Watched by an epoll set, because two threads may ask at a time, which a poll object refuses.
            self._end = select.epoll()
            pidfd = os.pidfd_open(self.board.pid)
        except OSError as error:
            self.board.close()
            raise TransferFailedError(f"the peer's process is gone: {error}") from error
        self._end.register(pidfd, select.EPOLLIN)
        self._pidfd = pidfd

    def is_dead(self) -> bool:
        """Return whether the process has ended (or was let go): bytes put there are lost."""
        # Readable once it has ended.
        return self._is_closed or bool(self._end.poll(0, 1))

    def close(self) -> None:
        """Unmap everything. A second call does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end.close()
        os.close(self._pidfd)
        self.board.close()


class MappedPeers:
    """Owns the mappings; one for each peer, of its latest epoch. The event loop's."""

    def __init__(self) -> None:
        self._peers: dict[str, MappedPeer] = {}
        self._is_closed = False

    def mapped(self, peer: PeerDescriptor) -> MappedPeer:
        """Return the peer's memory, mapped; an earlier epoch of it is dropped, and whoever has ended.

        Raises:
            TransferFailedError: it is not on this host, not ours to open, or gone.
        """
        if self._is_closed:
            raise TransferFailedError("this process is stopping")
        mapped = self._peers.get(peer.node_id)
        if mapped is not None and mapped.epoch == peer.epoch and not mapped.is_dead():
            return mapped
        for node_id, each in list(self._peers.items()):
            if each is mapped or each.is_dead():
                del self._peers[node_id]
                if not each.num_copies:
                    each.close()
        address = peer.address_or_none("shm") or peer.address_or_none("cuda_ipc")
        if address is None:
            raise TransferFailedError("the peer does not offer it")
        fresh = self._peers[peer.node_id] = MappedPeer(address, peer.epoch)
        return fresh

    def latest(self, peer: PeerDescriptor) -> MappedPeer:
        """Return it as `mapped` does, but perhaps dead: for who looks afterwards."""
        mapped = self._peers.get(peer.node_id)
        return mapped if mapped is not None and mapped.epoch == peer.epoch else self.mapped(peer)

    @contextmanager
    def copying(self, peer: PeerDescriptor) -> Iterator[MappedPeer]:
        """Keep what `latest` returns mapped for the length of a `with`."""
        mapped = self.latest(peer)
        mapped.num_copies += 1
        try:
            yield mapped
        finally:
            mapped.num_copies -= 1
            if not mapped.num_copies and self._peers.get(peer.node_id) is not mapped:
                mapped.close()

    def close(self) -> None:
        """Unmap everything, for ever; no copy may be under way."""
        self._is_closed = True
        for mapped in self._peers.values():
            mapped.close()
        self._peers.clear()
