"""The asking side of tcp against owners that lie, stall or leave: a bare socket plays the owner."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.segment import Segment
from transfer.tcp.frame import HEADER_BYTES, SMALL_BYTES, FrameKind, Header, pack, unpack_header
from transfer.tcp.greeting import Nonces, proof

CONFIG = TransferConfig(transports=("tcp",), connections=1)
LARGE = 4 * SMALL_BYTES
"""Goes by the reactor's links; a small one by the event loop's."""
SIZES = pytest.mark.parametrize("num_bytes", [64, LARGE])


@pytest.fixture
async def agent() -> AsyncIterator[TransferAgent]:
    async with TransferAgent("us", 1, CONFIG, SystemClock()) as started:
        yield started


@pytest.fixture
def segment(agent: TransferAgent) -> Segment:
    return agent.allocate(2 * LARGE)


def peer_at(address: str) -> PeerDescriptor:
    return PeerDescriptor("peer", 5, (Endpoint("tcp", address),))


def granted(operation: Operation = Operation.WRITE) -> Grant:
    return Grant(7, 1 << 20, operation, (0,), LARGE, 60.0)


class BareOwner:
    """Listens, greets and reads whole frames; what it answers is the test's."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self.peer = peer_at(f"127.0.0.1:{self._listener.getsockname()[1]}")
        self.sock: socket.socket

    async def greet(self) -> None:
        """Take a connection, greet its peer and go on with it."""
        self.sock, _ = await asyncio.to_thread(self._listener.accept)
        self.sock.settimeout(60)
        hello = await self.heard()
        assert hello.kind is FrameKind.HELLO
        nonces = Nonces((hello.generation, hello.offset), (0, 0))
        self.say(proof(FrameKind.WELCOME, self.peer.secret, self.peer.epoch, nonces))

    async def heard(self) -> Header:
        return unpack_header(await self.read(HEADER_BYTES))

    async def read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes and (
            more := await asyncio.to_thread(self.sock.recv, num_bytes - len(data))
        ):
            data += more
        return bytes(data)

    def say(self, header: Header, payload: bytes = b"") -> None:
        self.sock.sendall(pack(header) + payload)

    def close(self) -> None:
        self._listener.close()
        if hasattr(self, "sock"):
            self.sock.close()


@pytest.fixture
def owner() -> Iterator[BareOwner]:
    started = BareOwner()
    yield started
    started.close()


@pytest.mark.parametrize("kind", [FrameKind.ACK, FrameKind.DATA, FrameKind.REFUSED])
async def test_memory_is_not_read_after_an_answer_that_came_before_the_bytes_did(
    agent: TransferAgent, segment: Segment, owner: BareOwner, kind: FrameKind
) -> None:
    segment.memory[:LARGE] = b"\1" * LARGE
    writing = asyncio.ensure_future(agent.write(owner.peer, granted(), pieces_of(segment, [0], [0], LARGE)))
    await owner.greet()
    head = await owner.heard()
    owner.say(Header(kind, head.frame_id))
    with pytest.raises(TransferFailedError, match="has not been said yet"):
        await asyncio.wait_for(writing, 60)
    segment.memory[:LARGE] = b"\2" * LARGE
    assert b"\2" not in await owner.read(LARGE)


async def test_an_owner_that_floods_or_trickles_instead_of_answering_does_not_keep_the_loop(
    agent: TransferAgent, segment: Segment, owner: BareOwner
) -> None:
    """The loop looks for the answer of a small batch for a millisecond, not for as long as bytes come."""
    is_over = threading.Event()

    def flood() -> None:
        recalls = pack(Header(FrameKind.RECALL)) * 1000
        with suppress(OSError):
            while not is_over.is_set():
                owner.sock.sendall(recalls)

    reading = asyncio.ensure_future(
        agent.read(owner.peer, granted(Operation.READ), pieces_of(segment, [0], [0], 64), 0.2)
    )
    await owner.greet()
    await owner.heard()
    flooding = threading.Thread(target=flood)
    flooding.start()
    # Its turn has the loop looking.
    again = agent.read(owner.peer, granted(Operation.READ), pieces_of(segment, [64], [0], 64), 0.2)
    watchdog = threading.Timer(5, is_over.set)
    watchdog.start()
    outcomes = await asyncio.gather(reading, again, return_exceptions=True)
    assert not is_over.is_set()
    is_over.set()
    watchdog.cancel()
    owner.sock.shutdown(socket.SHUT_RDWR)
    await asyncio.to_thread(flooding.join)
    assert [type(each) for each in outcomes] == [TransferFailedError] * 2


@SIZES
@pytest.mark.parametrize("address", ["no address", "a\0b:1", "256.0.0.1:1", "127.0.0.1:99999", "\ud800:1"])
async def test_an_address_that_is_none_fails_the_batch_and_nothing_else(
    agent: TransferAgent, segment: Segment, address: str, num_bytes: int
) -> None:
    with pytest.raises(TransferFailedError, match="cannot connect"):
        await agent.write(peer_at(address), granted(), pieces_of(segment, [0], [0], num_bytes), 5.0)
    async with asyncio.timeout(60):
        await agent.revoke(agent.grant(segment, (0,), 64, Operation.WRITE, 60.0))
