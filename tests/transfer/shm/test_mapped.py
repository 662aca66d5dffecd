"""What stays mapped of a peer's memory, and what does not, when its process ends."""

from collections.abc import Iterator

import pytest

from base.errors import TransferFailedError
from tests.transfer.descriptors import descriptors
from tests.transfer.remote_peer import RemotePeer
from transfer.shm.mapped import MappedPeers


@pytest.fixture
def peers() -> Iterator[MappedPeers]:
    started = MappedPeers()
    yield started
    started.close()


def test_a_peer_that_ends_during_a_copy_is_let_go_of_with_the_copy(peers: MappedPeers) -> None:
    before = len(descriptors())
    with RemotePeer(("shm",)) as peer:
        with peers.copying(peer.descriptor) as mapped:
            peer.kill()
            # Another batch finds it gone.
            with pytest.raises(TransferFailedError):
                peers.mapped(peer.descriptor)
            assert mapped.board.shows(1, on_device=False) is False
        assert mapped.is_dead()
        del mapped
    assert len(descriptors()) == before


def test_a_peer_that_has_ended_is_let_go_of_when_another_comes(peers: MappedPeers) -> None:
    """It may never come back under its name, and its memory would stay with us."""
    with RemotePeer(("shm",), "other") as other:
        with RemotePeer(("shm",), "first") as first:
            before = len(descriptors())
            peers.mapped(first.descriptor)
            of_one = len(descriptors()) - before
        peers.mapped(other.descriptor)
        # The pipes to the first one's process are closed as well.
        assert len(descriptors()) == before - 2 + of_one
