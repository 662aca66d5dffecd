"""Copies over shared memory: which of them let others have the interpreter."""

import ctypes

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.grants import Operation
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.shm import INLINE_BYTES

CONFIG = TransferConfig(transports=("shm",))
BLOCK = 64 << 10


@pytest.mark.parametrize(
    ("block", "num_blocks", "lettings_go"),
    [
        (BLOCK, INLINE_BYTES // BLOCK, 0),
        (INLINE_BYTES, 1, 0),
        (INLINE_BYTES + 1, 1, 1),
        (BLOCK, 3 * INLINE_BYTES // BLOCK, 2),
    ],
    ids=["small blocks", "one block", "one larger block", "many small blocks"],
)
async def test_a_copy_lets_go_of_the_interpreter_once_in_four_mib_and_not_for_each_block(
    monkeypatch: pytest.MonkeyPatch, block: int, num_blocks: int, lettings_go: int
) -> None:
    seen = []
    memmove = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda *call: seen.append(call[2]) or memmove(*call))
    # With gaps between them, or they would be one.
    offsets = [2 * block * index for index in range(num_blocks)]
    async with (
        TransferAgent("us", 1, CONFIG, SystemClock()) as owner,
        TransferAgent("them", 2, CONFIG, SystemClock()) as asker,
    ):
        target, source = owner.allocate(2 * block * num_blocks), asker.allocate(2 * block * num_blocks)
        source.memory[:] = b"\7" * source.num_bytes
        grant = owner.grant(target, offsets, block, Operation.WRITE, 10.0)
        await asker.write(owner.descriptor, grant, batch_of(source, offsets, offsets, block))
        assert len(seen) == lettings_go
        assert bytes(target.memory) == (b"\7" * block + bytes(block)) * num_blocks
