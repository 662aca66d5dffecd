"""What a request waits for goes before background work on the same link."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from transfer.agent import TransferAgent
from transfer.batch import Priority, pieces_of
from transfer.tcp.frame import HEADER_BYTES, MAX_FRAME_BYTES, FrameKind, Header, pack, unpack_header
from transfer.tcp.greeting import Nonces, proof
from transfer.tcp.link import MAX_IN_FLIGHT

EPOCH = 1
NUM_BYTES = MAX_FRAME_BYTES * (MAX_IN_FLIGHT + 4)


class RecordingPeer:
    """Answers every write and notes its generation."""

    def __init__(self) -> None:
        self.generations: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(HEADER_BYTES):
            head += await reader.readexactly(HEADER_BYTES - len(head))
            header = unpack_header(head)
            if header.kind is FrameKind.HELLO:
                nonces = Nonces((header.generation, header.offset), (0, 0))
                writer.write(pack(proof(FrameKind.WELCOME, b"", EPOCH, nonces)))
            else:
                await reader.readexactly(header.table_bytes + header.num_bytes)
                self.generations.append(header.generation)
                writer.write(pack(Header(FrameKind.ACK, header.frame_id)))
        writer.close()


@pytest.fixture
async def peer() -> AsyncIterator[tuple[RecordingPeer, PeerDescriptor]]:
    recording = RecordingPeer()
    server = await asyncio.start_server(recording.serve, "127.0.0.1", 0, family=socket.AF_INET)
    host, port = server.sockets[0].getsockname()
    yield recording, PeerDescriptor("peer", EPOCH, (Endpoint("tcp", f"{host}:{port}"),))
    server.close()


async def test_an_urgent_batch_overtakes_background_work_that_is_not_sent_yet(peer) -> None:
    recording, descriptor = peer
    config = TransferConfig(transports=("tcp",), connections=1)
    async with TransferAgent("us", 2, config, SystemClock()) as agent:
        segment = agent.allocate(NUM_BYTES)
        background, urgent = (
            Grant(9, generation, Operation.WRITE, (0,), NUM_BYTES, 60.0) for generation in (1, 2)
        )
        async with asyncio.TaskGroup() as group:
            whole = pieces_of(segment, [0], [0], NUM_BYTES)
            group.create_task(agent.write(descriptor, background, whole, priority=Priority.BACKGROUND))
            one = pieces_of(segment, [0], [0], MAX_FRAME_BYTES)
            group.create_task(agent.write(descriptor, urgent, one))
    assert sorted(recording.generations) == [1] * (MAX_IN_FLIGHT + 4) + [2]
    assert recording.generations.index(2) <= MAX_IN_FLIGHT
