"""Which connections a batch over tcp takes."""

import asyncio
import gc
import random
import socket

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.tcp.frame import SMALL_BYTES
from transfer.tcp.link import ClientLink
from transfer.tcp.transport import TcpTransport

NUM_BYTES = 2 * SMALL_BYTES
"""One frame, for the links of the reactors."""
CONFIG = TransferConfig(transports=("tcp",), connections=3)


async def test_batches_one_after_the_other_share_a_connection_and_those_at_once_take_one_each() -> None:
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock()) as us,
        TransferAgent("owner", 2, CONFIG, SystemClock()) as owner,
    ):
        ours, theirs = us.allocate(4 * NUM_BYTES), owner.allocate(4 * NUM_BYTES)
        ours.memory[:] = random.Random(1).randbytes(ours.num_bytes)
        offsets = list(range(0, ours.num_bytes, NUM_BYTES))
        grant = owner.grant(theirs, offsets, NUM_BYTES, Operation.WRITE, 30.0)
        transport = us._router._transports["tcp"]
        assert isinstance(transport, TcpTransport)

        async def write(offset: int) -> None:
            await us.write(owner.descriptor, grant, pieces_of(ours, [offset], [offset], NUM_BYTES))

        def num_frames() -> list[int]:
            return [link._link._next_id - 1 for link in transport._peers["owner"]._bulk]

        for offset in offsets:
            await write(offset)
        assert num_frames() == [4, 0, 0]
        await asyncio.gather(*map(write, offsets[:3]))
        assert num_frames() == [5, 1, 1]
        assert [link.num_batches for link in transport._peers["owner"]._bulk] == [0, 0, 0]
        assert theirs.memory == ours.memory


async def test_nothing_is_kept_of_peers_that_are_gone() -> None:
    def num_links() -> int:
        gc.collect()
        return sum(type(each) is ClientLink for each in gc.get_objects())

    config, before = TransferConfig(transports=("tcp",)), num_links()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        endpoint = Endpoint("tcp", f"127.0.0.1:{nobody.getsockname()[1]}")
    async with TransferAgent("us", 1, config, SystemClock()) as us:
        segment = us.allocate(1)
        for number in range(50):
            peer = PeerDescriptor(f"node-{number}", 1, (endpoint,))
            grant = Grant(1, 1 << 16, Operation.WRITE, (0,), 1, 60.0)
            with pytest.raises(TransferFailedError):
                await us.write(peer, grant, pieces_of(segment, [0], [0], 1))
        assert num_links() - before < 4
