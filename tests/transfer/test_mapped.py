"""What stays mapped of a peer's memory, and what does not, when its process ends."""

import os
from collections.abc import Iterator

import pytest

from base.errors import TransferFailedError
from tests.transfer.remote_peer import RemotePeer
from transfer.mapped import MappedPeers


@pytest.fixture
def peers() -> Iterator[MappedPeers]:
    started = MappedPeers()
    yield started
    started.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_peer_that_ends_during_a_copy_is_let_go_of_with_the_copy(peers: MappedPeers) -> None:
    before = num_descriptors()
    with RemotePeer(("shm",)) as peer:
        with peers.copying(peer.descriptor) as mapped:
            peer.kill()
            # Another batch finds it gone.
            with pytest.raises(TransferFailedError):
                peers.mapped(peer.descriptor)
            assert mapped.board.shows(1, on_device=False) is False
        assert mapped.is_dead()
        del mapped
    assert num_descriptors() == before


def test_a_peer_that_has_ended_is_let_go_of_when_another_comes(peers: MappedPeers) -> None:
    """It may never come back under its name, and its memory would stay with us."""
    with RemotePeer(("shm",), "other") as other:
        with RemotePeer(("shm",), "first") as first:
            before = num_descriptors()
            peers.mapped(first.descriptor)
            of_one = num_descriptors() - before
        peers.mapped(other.descriptor)
        # The pipes to the first one's process are closed as well.
        assert num_descriptors() == before - 2 + of_one
