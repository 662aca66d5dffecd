"""The asking side of tcp against owners that lie, stall or leave: a bare socket plays the owner."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import TransferFailedError
from base.grants import Endpoint, Grant, Operation, PeerDescriptor
from transfer.agent import TransferAgent
from transfer.batch import batch_of
from transfer.frame import SMALL_BYTES
from transfer.segment import Segment

LARGE = 4 * SMALL_BYTES
"""Goes by the reactor's links; a small one by the event loop's."""
SIZES = pytest.mark.parametrize("num_bytes", [64, LARGE])


@pytest.fixture
async def agent() -> AsyncIterator[TransferAgent]:
    async with TransferAgent("us", 1, TransferConfig(transports=("tcp",)), SystemClock()) as started:
        yield started


@pytest.fixture
def segment(agent: TransferAgent) -> Segment:
    return agent.allocate(2 * LARGE)


def peer_at(address: str) -> PeerDescriptor:
    return PeerDescriptor("peer", 5, (Endpoint("tcp", address),))


def granted(operation: Operation = Operation.WRITE) -> Grant:
    return Grant(7, 1 << 20, operation, (0,), LARGE, 60.0)


@SIZES
@pytest.mark.parametrize("address", ["no address", "a\0b:1", "256.0.0.1:1", "127.0.0.1:99999", "\ud800:1"])
async def test_an_address_that_is_none_fails_the_batch_and_nothing_else(
    agent: TransferAgent, segment: Segment, address: str, num_bytes: int
) -> None:
    with pytest.raises(TransferFailedError, match="cannot connect"):
        await agent.write(peer_at(address), granted(), batch_of(segment, [0], [0], num_bytes), 5.0)
    async with asyncio.timeout(5):
        await agent.revoke(agent.grant(segment, (0,), 64, Operation.WRITE, 60.0))
