"""What the agent does by itself: starting, refusing, saying why."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import ProtocolError, StaleError, TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from tests.transfer.rdma.made_up_rails import FakeRail
from tests.uncollected import uncollected
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.board import MAX_SEGMENTS


def agent(**config) -> TransferAgent:
    return TransferAgent("us", 1, TransferConfig(**config), SystemClock())


async def test_a_port_that_is_taken_is_an_error_at_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        async with agent(port=taken.getsockname()[1]):
            pass


async def test_a_start_that_fails_leaves_nothing_watched_of_the_rails(monkeypatch) -> None:
    """Their descriptors' numbers are somebody else's afterwards."""
    rail = FakeRail("rail")
    monkeypatch.setattr("transfer.rdma.transport.open_rails", lambda driver: ([rail], ""))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        async with agent(port=taken.getsockname()[1], transports=("rdma",)):
            pass
    assert not asyncio.get_running_loop().remove_reader(rail.channel_fd)


async def test_a_transport_that_cannot_work_here_says_why_in_one_line() -> None:
    async with agent(transports=("rdma", "tcp")) as started:
        grant = Grant(1, 1 << 16, Operation.WRITE, (0,), 1, 1.0)
        pieces = pieces_of(started.allocate(1), [0], [0], 1)
        with pytest.raises(TransferFailedError, match=r"rdma: [^;]") as caught:
            await started.write(PeerDescriptor("peer", 9, ()), grant, pieces)
    assert "\n" not in str(caught.value)


async def test_a_peer_that_nobody_listens_for_is_a_transfer_failure_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    peer = PeerDescriptor("peer", 9, (Endpoint("tcp", f"127.0.0.1:{port}"),))
    async with agent() as started:
        source = started.allocate(10)
        grant = Grant(1, 1 << 16, Operation.WRITE, (0,), 10, 1.0)
        with pytest.raises(TransferFailedError, match="refused"):
            await started.write(peer, grant, pieces_of(source, [0], [0], 10))


async def test_a_peer_that_never_answers_fails_the_batch_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = PeerDescriptor("peer", 9, (Endpoint("tcp", f"127.0.0.1:{silent.getsockname()[1]}"),))
        async with agent() as started:
            source = started.allocate(10)
            grant = Grant(1, 1 << 16, Operation.WRITE, (0,), 10, 1.0)
            with pytest.raises(TransferFailedError, match="no end within"):
                await started.write(peer, grant, pieces_of(source, [0], [0], 10), deadline_s=0.05)


@pytest.mark.parametrize(("offsets", "length"), [((95,), 10), ((-1,), 5), ((), 5), ((0,), 0)])
async def test_what_is_not_in_the_segment_cannot_be_granted(offsets: tuple[int, ...], length: int) -> None:
    async with agent() as owner:
        segment = owner.allocate(100)
        with pytest.raises(ValueError, match="grant"):
            owner.grant(segment, offsets, length, Operation.WRITE, 10.0)
        assert owner.num_grants == 0


async def test_a_grant_to_read_is_not_written_by() -> None:
    async with agent() as owner:
        segment = owner.allocate(100)
        grant = owner.grant(segment, (0,), 100, Operation.READ, 10.0)
        with pytest.raises(ProtocolError):
            await owner.write(owner.descriptor, grant, pieces_of(segment, [0], [0], 100))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Allow this process no new descriptor for the body, also where one that it has is closed meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of a new descriptor's number, and those below are standard input, output and errors.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_a_descriptor_a_segment_is_refused_and_says_why() -> None:
    async with agent() as owner:
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
            owner.allocate(100)
        assert owner.allocate(100).num_bytes == 100


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_without_a_descriptor_a_new_peer_is_a_transfer_failure_that_says_why(transport: str) -> None:
    async with (
        agent(transports=(transport,)) as asker,
        TransferAgent("them", 2, TransferConfig(transports=(transport,)), SystemClock()) as owner,
    ):
        source, target = asker.allocate(10), owner.allocate(10)
        grant = owner.grant(target, (0,), 10, Operation.WRITE, 60.0)
        batch, peer = pieces_of(source, [0], [0], 10), owner.descriptor
        with no_descriptor_left(), pytest.raises(TransferFailedError, match="Too many open files"):
            await asker.write(peer, grant, batch)
        await asker.write(peer, grant, batch)


async def test_more_shared_segments_than_the_board_shows_are_refused() -> None:
    async with agent() as owner:
        for _ in range(MAX_SEGMENTS):
            owner.allocate(1)
        with pytest.raises(ValueError, match=f"at most {MAX_SEGMENTS}"):
            owner.allocate(1)


async def failed_write(asker, source, owner, grant):
    try:
        await asker.write(owner, grant, pieces_of(source, [0], [0], source.num_bytes))
    except (StaleError, TransferFailedError) as error:
        return type(error)


@pytest.mark.parametrize("num_bytes", [100, 1 << 20])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_write_that_is_refused_leaves_nothing_for_the_garbage_collector(transport, num_bytes) -> None:
    config = TransferConfig(transports=(transport,))
    async with agent(transports=(transport,)) as owner, TransferAgent("b", 2, config, SystemClock()) as asker:
        target, source = owner.allocate(num_bytes), asker.allocate(num_bytes)
        grant = owner.grant(target, (0,), num_bytes, Operation.WRITE, 10.0)
        await owner.revoke(grant)
        with uncollected() as left:
            assert await failed_write(asker, source, owner.descriptor, grant) is StaleError
            await asyncio.sleep(0)
            assert left(BaseException) == []


@pytest.mark.parametrize("num_bytes", [100, 20 << 20])
async def test_a_peer_that_cannot_be_reached_leaves_nothing_for_the_garbage_collector(num_bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    peer = PeerDescriptor("peer", 9, (Endpoint("tcp", address),))
    grant = Grant(1, 1 << 16, Operation.WRITE, (0,), num_bytes, 10.0)
    async with agent(transports=("tcp",)) as asker:
        source = asker.allocate(num_bytes)
        with uncollected() as left:
            for _ in range(3):
                assert await failed_write(asker, source, peer, grant) is TransferFailedError
            await asyncio.sleep(0)
            assert left(BaseException) == []
