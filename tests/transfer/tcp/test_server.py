"""The tcp port against peers that stall, lie or leave: told by a bare socket."""

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import LeaseExpiredError, ProtocolError, ServeError, StaleError, TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from tests.manual_clock import ManualClock
from tests.transfer.rdma.made_up_rails import FakeRail
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.owned.board import digest_of
from transfer.owned.holdings import Holdings
from transfer.owned.segment import Segment
from transfer.rdma.holds import ADMISSION_BYTES, pack_admission
from transfer.rdma.registrations import Reach
from transfer.rdma.topology import Distance
from transfer.rdma.verbs import QueuePairEnd
from transfer.tcp.frame import HEADER_BYTES, FrameKind, Header, pack, refusal_error, table_of, unpack_header
from transfer.tcp.greeting import SECRET_BYTES, Nonces, PeerKey, proof, proves
from transfer.tcp.reactor import Reactor, num_reactors
from transfer.tcp.server import TcpServer

EPOCH = 77
SECRET = bytes(range(SECRET_BYTES))
HELLO = pack(Header(FrameKind.HELLO, generation=1, offset=2))
TABLE = table_of(np.array([0, 8]), np.array([4, 4]))
BLOCK = 1 << 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=[1, 3])
async def agent(
    clock: ManualClock, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TransferAgent]:
    monkeypatch.setattr("transfer.tcp.host.num_reactors", lambda connections: request.param)
    async with owner(clock) as started:
        yield started


@pytest.fixture
def segment(agent: TransferAgent) -> Segment:
    return agent.allocate(4 * BLOCK)


@pytest.fixture
async def dial(agent: TransferAgent) -> AsyncIterator[Callable[[], socket.socket]]:
    opened: list[socket.socket] = []
    host, _, port = agent.descriptor.endpoints[0].address.rpartition(":")

    def connect() -> socket.socket:
        opened.append(socket.create_connection((host, int(port)), timeout=60))
        return opened[-1]

    yield connect
    for sock in opened:
        sock.close()


async def received(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            more = await asyncio.to_thread(sock.recv, count - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            break
        data += more
    return bytes(data)


def known_bits(count: int) -> int:
    """Return SECRET where a secret is drawn, else what nobody knows."""
    return int.from_bytes(SECRET, "little") if count == 8 * SECRET_BYTES else secrets.randbits(count)


def owner(clock: ManualClock, transport: str = "tcp") -> TransferAgent:
    config = TransferConfig(transports=(transport,))
    return TransferAgent("owner", EPOCH, config, clock, random_bits=known_bits)


async def challenged(sock: socket.socket) -> Nonces:
    sock.sendall(HELLO)
    header = unpack_header(await received(sock, HEADER_BYTES))
    assert header.kind is FrameKind.CHALLENGE
    return Nonces((1, 2), (header.generation, header.offset))


async def greeted(sock: socket.socket) -> socket.socket:
    nonces = await challenged(sock)
    sock.sendall(pack(proof(FrameKind.PROOF, SECRET, EPOCH, nonces)))
    welcome = unpack_header(await received(sock, HEADER_BYTES))
    assert welcome.kind is FrameKind.WELCOME
    assert proves(welcome, SECRET, EPOCH, nonces)
    return sock


async def refusal(sock: socket.socket) -> ServeError:
    header = unpack_header(await received(sock, HEADER_BYTES))
    assert header.kind is FrameKind.REFUSED
    return refusal_error(header, await received(sock, header.num_bytes))


def broken(fault: type[Exception]) -> Callable[..., object]:
    def call(*_: object) -> object:
        raise fault("nobody foresaw this")

    return call


def write_head(grant: Grant, num_bytes: int = BLOCK) -> bytes:
    return pack(
        Header(FrameKind.WRITE, 5, num_bytes, grant.segment_id, grant.generation, offset=grant.offsets[0])
    )


async def test_a_revocation_does_not_wait_for_a_peer_that_stalls_in_a_write(agent, segment, dial) -> None:
    grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
    sock = await greeted(dial())
    sock.sendall(write_head(grant) + b"\1" * (BLOCK // 2))
    async with asyncio.timeout(60):
        await agent.revoke(grant)
    segment.memory[:BLOCK] = b"\2" * BLOCK
    sock.sendall(b"\1" * (BLOCK - BLOCK // 2))
    assert isinstance(await refusal(sock), StaleError)
    assert segment.memory[:BLOCK] == b"\2" * BLOCK


async def test_a_lease_that_runs_out_in_the_middle_of_a_write_ends_it(agent, segment, dial, clock) -> None:
    grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
    sock = await greeted(dial())
    sock.sendall(write_head(grant) + b"\1" * 100)
    clock.advance(60.0)
    agent.sweep()
    await agent.revoke(grant)
    before = bytes(segment.memory[:BLOCK])
    sock.sendall(b"\3" * (BLOCK - 100))
    assert isinstance(await refusal(sock), LeaseExpiredError)
    assert segment.memory[:BLOCK] == before


async def test_a_read_that_was_revoked_is_whole_or_refused(agent, segment, dial) -> None:
    """The peer does not read: most of the answers are still here when the grant ends."""
    grant = agent.grant(segment, (0,), 4 * BLOCK, Operation.READ, 60.0)
    segment.memory[:] = b"\5" * (4 * BLOCK)
    sock = await greeted(dial())
    for frame_id in range(8):
        head = Header(FrameKind.READ, frame_id, 4 * BLOCK, grant.segment_id, grant.generation)
        sock.sendall(pack(head))
    assert unpack_header(await received(sock, HEADER_BYTES)).kind is FrameKind.DATA
    async with asyncio.timeout(60):
        await agent.revoke(grant)
    segment.memory[:] = b"\6" * (4 * BLOCK)
    assert await received(sock, 4 * BLOCK) == b"\5" * (4 * BLOCK)
    kinds = set()
    for _ in range(7):
        header = unpack_header(await received(sock, HEADER_BYTES))
        kinds.add(header.kind)
        payload = await received(sock, header.num_bytes)
        assert header.kind is FrameKind.REFUSED or payload == b"\5" * (4 * BLOCK)
    assert FrameKind.REFUSED in kinds


async def test_a_range_outside_the_grant_is_refused_and_the_connection_goes_on(agent, segment, dial) -> None:
    grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
    sock = await greeted(dial())
    head = Header(FrameKind.WRITE, 5, 10, grant.segment_id, grant.generation, offset=BLOCK - 5)
    sock.sendall(pack(head) + b"\1" * 10)
    assert isinstance(await refusal(sock), ProtocolError)
    sock.sendall(write_head(grant, 10) + b"\4" * 10)
    assert unpack_header(await received(sock, HEADER_BYTES)).kind is FrameKind.ACK
    assert segment.memory[: BLOCK + 1] == b"\4" * 10 + bytes(BLOCK - 9)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        pack(Header(FrameKind.READ, 1, 8, 1, 1)),
        pack(Header(FrameKind.ACK, 1)),
        HELLO * 2,
        HELLO + pack(Header(FrameKind.DATA, 1, 0)),
        HELLO + pack(Header(FrameKind.PAIR, 1, 1)) + b"x",
        HELLO + pack(Header(FrameKind.WRITE, 1, 9, 1, 1), TABLE),
    ],
)
async def test_whoever_breaks_the_protocol_is_disconnected_and_others_are_served(
    agent, segment, dial, said
) -> None:
    rude, other = dial(), await greeted(dial())
    rude.sendall(said)
    rest = await received(rude, 1 << 20)
    assert len(rest) <= 2 * HEADER_BYTES
    grant = agent.grant(segment, (0,), 10, Operation.WRITE, 60.0)
    other.sendall(write_head(grant, 10) + b"\4" * 10)
    assert unpack_header(await received(other, HEADER_BYTES)).kind is FrameKind.ACK


@pytest.mark.parametrize("fault", [MemoryError, RuntimeError, OSError, ValueError])
async def test_a_fault_that_nobody_foresaw_ends_its_connection_and_no_other(
    agent, segment, dial, monkeypatch, fault
) -> None:
    unlucky, other = await greeted(dial()), await greeted(dial())
    grant = agent.grant(segment, (0,), 10, Operation.WRITE, 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(Holdings, "views", broken(fault))
        unlucky.sendall(write_head(grant, 10) + b"\4" * 10)
        assert await received(unlucky, 1) == b""
    other.sendall(write_head(grant, 10) + b"\4" * 10)
    assert unpack_header(await received(other, HEADER_BYTES)).kind is FrameKind.ACK
    async with asyncio.timeout(60):
        await agent.revoke(grant)


async def test_who_comes_when_descriptors_run_out_is_turned_away_and_nobody_elses_is_closed(
    agent, segment, dial, monkeypatch
) -> None:
    """Somebody else takes the one that was given up for it."""
    await greeted(dial())
    server, spare = agent._host.server, agent._host.server._spare_fd
    listener = server._listener
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", no_descriptor)
            patched.setattr(server, "_listener", ListenerWithout(listener))
            assert await received(dial(), 1) == b""
    taken = [os.dup(listener.fileno())]
    while taken[-1] < spare:
        taken.append(os.dup(listener.fileno()))
    with monkeypatch.context() as patched:
        patched.setattr(server, "_listener", ListenerWithout(listener))
        assert await received(dial(), 1) == b""
    for fd in taken:
        os.close(fd)
    await greeted(dial())


async def test_connections_that_say_nothing_keep_no_peer_out(agent, segment, dial, monkeypatch) -> None:
    # Two of four places on each thread.
    some = 2 * len(agent._host.server._desks)
    monkeypatch.setattr("transfer.tcp.server.MAX_CONNECTIONS", 2 * some)
    served = [await greeted(dial()) for _ in range(some)]
    silent = [dial() for _ in range(some)]
    served += [await greeted(dial()) for _ in range(some)]
    assert [await received(sock, 1) for sock in silent] == [b""] * some
    # As many peers at work as there are places: there is no place, and none of them makes room.
    assert await received(dial(), 1) == b""
    grant = agent.grant(segment, (0,), 10, Operation.WRITE, 60.0)
    for sock in served:
        sock.sendall(write_head(grant, 10) + b"\4" * 10)
        assert unpack_header(await received(sock, HEADER_BYTES)).kind is FrameKind.ACK


class ListenerWithout:
    """A listening socket in a process that has no descriptor left, but for who closes one before."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._calls = 0

    def accept(self):
        self._calls += 1
        if self._calls == 1:
            no_descriptor()
        return self._listener.accept()


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    "how", ["no proof", "another secret", "no secret", "another epoch", "a proof heard before", "a WELCOME"]
)
async def test_who_does_not_know_the_descriptor_is_not_served_whatever_is_wrong(
    agent, segment, dial, how
) -> None:
    grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
    heard = proof(FrameKind.PROOF, SECRET, EPOCH, await challenged(dial()))
    sock = dial()
    nonces = await challenged(sock)
    words = {
        "no proof": Header(FrameKind.PROOF),
        "another secret": proof(FrameKind.PROOF, bytes(SECRET_BYTES), EPOCH, nonces),
        "no secret": proof(FrameKind.PROOF, b"", EPOCH, nonces),
        "another epoch": proof(FrameKind.PROOF, SECRET, EPOCH + 1, nonces),
        "a proof heard before": heard,
        "a WELCOME": proof(FrameKind.WELCOME, SECRET, EPOCH, nonces)._replace(kind=FrameKind.PROOF),
    }
    sock.sendall(pack(words[how]))
    error = await refusal(sock)
    assert (type(error), str(error)) == (StaleError, "this is not the process of that descriptor")
    sock.sendall(write_head(grant, 4) + b"\1" * 4)
    assert await received(sock, 1) == b""
    assert segment.memory[:4] == bytes(4)


@pytest.mark.parametrize("secret", [SECRET, b""])
async def test_an_owner_that_proves_nothing_is_sent_nothing(secret: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("tcp", f"127.0.0.1:{listener.getsockname()[1]}")
        peer = PeerDescriptor("owner", EPOCH, (endpoint,), secret)
        async with TransferAgent("us", 2, TransferConfig(transports=("tcp",)), SystemClock()) as agent:
            segment = agent.allocate(BLOCK)
            grant = Grant(9, 1, Operation.WRITE, (0,), 64, 60.0)
            writing = asyncio.ensure_future(agent.write(peer, grant, pieces_of(segment, [0], [0], 64)))
            sock, _ = await asyncio.to_thread(listener.accept)
            with sock:
                sock.settimeout(60)
                assert unpack_header(await received(sock, HEADER_BYTES)).kind is FrameKind.HELLO
                sock.sendall(pack(Header(FrameKind.WELCOME)))
                assert await received(sock, 1) == b""
            with pytest.raises(TransferFailedError):
                await writing


async def test_a_peer_that_leaves_in_the_middle_of_a_write_holds_nothing(agent, segment, dial) -> None:
    grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
    sock = await greeted(dial())
    sock.sendall(write_head(grant) + b"\1" * 1000)
    sock.close()
    async with asyncio.timeout(60):
        await agent.revoke(grant)
    assert agent.num_grants == 0


@asynccontextmanager
async def holder(clock, monkeypatch):
    """Return an owner with a NIC, a grant, a connection that is paired and holds the grant, and the NIC."""
    rail = FakeRail("one", key=9)
    monkeypatch.setattr("transfer.rdma.transport.open_rails", lambda driver: ([rail], ""))
    monkeypatch.setattr("transfer.agent.CUT_AFTER_S", 0.05)
    async with owner(clock, "rdma") as agent:
        segment = agent.allocate(BLOCK)
        grant = agent.grant(segment, (0,), BLOCK, Operation.WRITE, 60.0)
        host, _, port = agent.descriptor.endpoints[0].address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            await greeted(sock)
            offer = QueuePairEnd(1, 2, 0, 3, bytes(16)).pack()
            sock.sendall(pack(Header(FrameKind.PAIR, 1, len(offer))) + offer)
            await received(sock, HEADER_BYTES + len(offer))
            sock.sendall(hold_of(2, grant))
            admission = (await received(sock, HEADER_BYTES + ADMISSION_BYTES))[HEADER_BYTES:]
            assert admission == pack_admission(60.0, Reach(segment.address, (9,), (Distance.ANY,)))
            yield agent, segment, grant, sock, rail


def hold_of(frame_id: int, grant: Grant) -> bytes:
    return pack(Header(FrameKind.HOLD, frame_id, generation=grant.generation, offset=digest_of(grant)))


async def test_a_peer_that_keeps_what_was_recalled_loses_its_queue_pairs(clock, monkeypatch) -> None:
    async with holder(clock, monkeypatch) as (agent, _, grant, sock, rail):
        sock.sendall(pack(Header(FrameKind.HOLD, 3, generation=grant.generation, offset=1)))
        assert isinstance(await refusal(sock), ProtocolError)
        async with asyncio.timeout(60):
            await agent.revoke(grant)
        recall = unpack_header(await received(sock, HEADER_BYTES))
        assert (recall.kind, recall.generation) == (FrameKind.RECALL, grant.generation)
        assert await received(sock, 1) == b""
        assert rail.pairs[0].is_closed


@pytest.mark.parametrize(
    ("connections", "processors", "expected"), [(2, 2, 1), (2, 8, 2), (2, 64, 2), (8, 16, 4)]
)
def test_each_connection_has_a_thread_where_there_are_processors_for_it(
    connections: int, processors: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(processors)))
    assert num_reactors(connections) == expected


async def test_connections_are_dealt_out_and_a_revocation_waits_for_those_of_every_thread(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.tcp.host.num_reactors", lambda connections: 2)
    async with owner(clock) as agent:
        segment = agent.allocate(BLOCK)
        grant = agent.grant(segment, [0], BLOCK, Operation.WRITE, 10.0)
        header = Header(FrameKind.WRITE, 1, BLOCK, grant.segment_id, grant.generation, 0)
        host, _, port = agent.descriptor.endpoints[0].address.rpartition(":")
        peers = []
        for _ in range(2):
            peers.append(await greeted(socket.create_connection((host, int(port)), timeout=60)))
            peers[-1].sendall(pack(header) + b"\1" * 100)
        while segment.memory[99] == 0:
            await asyncio.sleep(0)
        assert [len(desk._links) for desk in agent._host.server._desks] == [1, 1]
        await agent.revoke(grant)
        segment.memory[:] = bytes(BLOCK)
        for peer in peers:
            peer.sendall(b"\1" * (BLOCK - 100))
            assert isinstance(await refusal(peer), StaleError)
            peer.close()
        assert not any(segment.memory)


def test_a_connection_that_comes_as_the_server_closes_is_closed(clock: ManualClock) -> None:
    reactor, (ours, theirs) = Reactor("test"), socket.socketpair()
    server = TcpServer("127.0.0.1", 0, PeerKey(SECRET, EPOCH), Holdings(clock, None), [reactor])
    server.close()
    reactor.post(lambda: server._desks[0].take(ours))
    reactor.stop()
    with theirs:
        assert theirs.recv(1) == b""


async def test_a_peer_that_gives_a_hold_the_name_of_another_is_disconnected(clock, monkeypatch) -> None:
    """The first would never be let go of, nor its holder be found, and a revocation would wait for ever."""
    async with holder(clock, monkeypatch) as (agent, segment, grant, sock, rail):
        later = agent.grant(segment, (0,), BLOCK, Operation.READ, 60.0)
        revoking = asyncio.ensure_future(agent.revoke(grant))
        assert unpack_header(await received(sock, HEADER_BYTES)).kind is FrameKind.RECALL
        sock.sendall(hold_of(2, later))
        await asyncio.wait_for(revoking, 60)
        assert await received(sock, 1) == b""
        assert rail.pairs[0].is_closed


async def test_a_peer_that_holds_without_end_is_disconnected(clock, monkeypatch) -> None:
    monkeypatch.setattr("transfer.tcp.server.MAX_HOLDS", 5)
    async with holder(clock, monkeypatch) as (_, _, grant, sock, _):
        sock.sendall(b"".join(hold_of(frame_id, grant) for frame_id in range(10, 20)))
        assert len(await received(sock, 1 << 20)) == 4 * (HEADER_BYTES + ADMISSION_BYTES)


async def test_a_peer_that_asks_and_never_reads_is_disconnected(dial) -> None:
    """Its answers would fill our memory."""
    sock = await greeted(dial())
    asked = pack(Header(FrameKind.READ, 1, 8, segment_id=1)) * 1_000_000
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        await asyncio.to_thread(sock.sendall, asked)
