"""Frames over one socket pair: what is told, what is taken without being told, what goes out in parts."""

import socket
from collections.abc import Callable, Iterator

import pytest

from transfer.tcp.frame import FrameKind, Header, pack, unpack_header
from transfer.tcp.reactor import READABLE
from transfer.tcp.stream import FrameStream, Incoming

ACK = pack(Header(FrameKind.ACK, 7))
PAYLOAD_BYTES = 4 << 20


class IdlePoller:
    """Watches nothing: the tests say when a socket is ready."""

    def __init__(self) -> None:
        self.on_ready: Callable[[int], None] = lambda events: None
        self.events = 0

    def watch(self, fd: int, events: int, on_ready: Callable[[int], None]) -> None:
        self.on_ready, self.events = on_ready, events

    def forget(self, fd: int) -> None:
        self.events = 0

    def post(self, call: Callable[[], None]) -> None:
        call()


class Told:
    """What a stream told its owner."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, int, bytes]] = []
        self.closed: list[str] = []

    def on_header(self, header: Header, table: memoryview) -> Incoming:
        return Incoming([memoryview(bytearray(header.payload_bytes))] if header.payload_bytes else ())

    def on_frame(self, header: Header, incoming: Incoming) -> None:
        self.frames.append((header.kind, header.frame_id, b"".join(incoming.views)))

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def poller() -> IdlePoller:
    return IdlePoller()


@pytest.fixture
def stream(ends: tuple[socket.socket, socket.socket], poller: IdlePoller, told: Told) -> FrameStream:
    return FrameStream(ends[0], poller, told)


@pytest.fixture
def theirs(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    return ends[1]


def test_frames_that_come_in_parts_or_together_are_each_reported_once(
    stream: FrameStream, theirs: socket.socket, poller: IdlePoller, told: Told
) -> None:
    refusal = pack(Header(FrameKind.REFUSED, 7, 3)) + b"why"
    theirs.sendall(ACK[:20])
    poller.on_ready(READABLE)
    assert told.frames == []
    theirs.sendall(ACK[20:] + refusal)
    poller.on_ready(READABLE)
    poller.on_ready(READABLE)
    assert told.frames == [(FrameKind.ACK, 7, b""), (FrameKind.REFUSED, 7, b"why")]


def test_a_peer_that_left_closes_the_stream(
    stream: FrameStream, theirs: socket.socket, poller: IdlePoller, told: Told
) -> None:
    theirs.close()
    poller.on_ready(READABLE)
    assert told.closed == ["the peer closed the connection"]


def test_what_the_socket_does_not_take_at_once_follows_when_it_can(
    stream: FrameStream, theirs: socket.socket, poller: IdlePoller
) -> None:
    payload = bytes(range(256)) * (PAYLOAD_BYTES // 256)
    stream.send(pack(Header(FrameKind.WRITE, 1, PAYLOAD_BYTES)), [memoryview(payload)], owner=3, frame_id=1)
    stream.send(ACK)
    assert stream.num_outgoing == 2
    got = bytearray()
    while len(got) < len(payload) + 2 * len(ACK):
        got += theirs.recv(1 << 20)
        poller.on_ready(poller.events)
    assert unpack_header(got[: len(ACK)]).kind is FrameKind.WRITE
    assert got[len(ACK) :] == payload + ACK
    assert stream.num_outgoing == 0


def test_the_rest_of_a_frame_that_has_begun_is_sent_from_a_copy_once_its_owner_is_detached(
    stream: FrameStream, theirs: socket.socket, poller: IdlePoller
) -> None:
    payload = bytearray(b"\1" * PAYLOAD_BYTES)
    stream.send(pack(Header(FrameKind.WRITE, 1, PAYLOAD_BYTES)), [memoryview(payload)], owner=3, frame_id=1)
    assert stream.detach(3) == []
    payload[:] = b"\2" * PAYLOAD_BYTES
    got = bytearray()
    while len(got) < PAYLOAD_BYTES + len(ACK):
        got += theirs.recv(1 << 20)
        poller.on_ready(poller.events)
    assert got[len(ACK) :] == b"\1" * PAYLOAD_BYTES


def test_a_head_and_its_payload_go_out_in_one_call_and_wake_a_sleeping_peer_once(
    poller: IdlePoller, told: Told
) -> None:
    # Between these, each call is a message of its own.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        head = pack(Header(FrameKind.WRITE, 1, 5))
        FrameStream(ours, poller, told).send(head, [memoryview(b"bytes")], owner=3, frame_id=1)
        assert theirs.recv(1000) == head + b"bytes"
