"""Many writes to one peer over shared memory at a time."""

import asyncio

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from transfer.agent import TransferAgent
from transfer.batch import TransferRequest


async def test_writes_to_one_peer_do_not_disturb_each_other():
    config = TransferConfig(transports=("shm",))
    clock = SystemClock()
    async with TransferAgent("a", 1, config, clock) as ours, TransferAgent("b", 2, config, clock) as theirs:
        source, target = ours.allocate(1 << 16), theirs.allocate(1 << 16)
        source.memory[:] = bytes(range(256)) * 256
        grants = [
            theirs.grant(target, [offset], 64, Operation.WRITE, 10.0) for offset in range(0, 1 << 16, 64)
        ]
        await asyncio.gather(
            *(
                ours.write(
                    theirs.descriptor,
                    grant,
                    [TransferRequest(source, grant.offsets[0], grant.offsets[0], 64)],
                )
                for grant in grants
            )
        )
        assert target.memory == source.memory
