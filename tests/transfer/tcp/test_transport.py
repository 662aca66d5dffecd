"""Which connections a batch over tcp takes."""

import asyncio
import random

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from transfer.agent import TransferAgent
from transfer.batch import pieces_of
from transfer.tcp.frame import SMALL_BYTES
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
