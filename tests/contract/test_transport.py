"""One suite for every transport: the contract in `transfer/transport.py`, between two processes."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from base.checksum import checksum
from base.clock import SystemClock
from base.config import TransferConfig
from base.errors import LeaseExpiredError, ProtocolError, StaleError, TransferFailedError
from base.grants import Grant, Operation
from tests.transfer.peer_process import allocated
from tests.transfer.remote_peer import RemotePeer
from transfer.agent import TransferAgent
from transfer.batch import Pieces, Priority, pieces_of
from transfer.owned.segment import Segment

TO_GPU, BETWEEN_GPUS = "tcp to a GPU", "tcp between GPUs"
BY_THREADS = "tcp by several threads"
TRANSPORTS = ("tcp", BY_THREADS, "shm", pytest.param("rdma", marks=pytest.mark.rdma), TO_GPU, BETWEEN_GPUS)
NUM_REACTORS = {BY_THREADS: 3, BETWEEN_GPUS: 3}
BLOCK = 64 << 10
NUM_BLOCKS = 64
"""Software RoCE in a virtual machine without hardware help runs 10 to 15 times slower."""
OFFSETS = tuple(range(0, NUM_BLOCKS * BLOCK, BLOCK))


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def peer(transport: str) -> Iterator[RemotePeer]:
    with remote_peer(transport) as started:
        yield started


@pytest.fixture
async def agent(transport: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TransferAgent]:
    monkeypatch.setattr("transfer.tcp.host.num_reactors", lambda connections: NUM_REACTORS.get(transport, 1))
    async with TransferAgent("us", 1, config_of(transport), SystemClock()) as started:
        yield started


@pytest.fixture
def target(peer: RemotePeer) -> int:
    return peer.allocate(NUM_BLOCKS * BLOCK)


@pytest.fixture
def source(agent: TransferAgent, transport: str) -> Segment:
    segment, memory = allocated(agent, NUM_BLOCKS * BLOCK, transport == BETWEEN_GPUS)
    # The bytes of a GPU's memory, which no segment shows.
    segment = replace(segment, memory=memory)
    segment.memory[:] = os.urandom(segment.num_bytes)
    return segment


def remote_peer(transport: str, node_id: str = "peer") -> RemotePeer:
    has_gpu, reactors = transport in (TO_GPU, BETWEEN_GPUS), NUM_REACTORS.get(transport, 1)
    return RemotePeer(config_of(transport).transports, node_id, has_gpu, reactors)


def config_of(transport: str) -> TransferConfig:
    return TransferConfig(transports=(transport.split()[0],))


def same_place(segment: Segment, offsets: tuple[int, ...], length: int = BLOCK) -> Pieces:
    return pieces_of(segment, offsets, offsets, length)


async def test_written_bytes_are_in_the_peers_memory_on_return(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = peer.grant(target, OFFSETS, BLOCK)
    await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))
    assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == checksum(source.memory)


async def test_scattered_blocks_land_where_they_were_sent_and_nowhere_else(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    peer.ask(do="fill", segment_id=target, value=7)
    places = OFFSETS[1::3]
    grant = peer.grant(target, places, BLOCK)
    ends = list(zip(OFFSETS, reversed(places), strict=False))
    await agent.write(peer.descriptor, grant, pieces_of(source, *zip(*ends, strict=True), BLOCK))
    expected = bytearray(b"\7" * NUM_BLOCKS * BLOCK)
    for ours, theirs in ends:
        expected[theirs : theirs + BLOCK] = source.memory[ours : ours + BLOCK]
    assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == checksum(expected)


async def test_a_read_fetches_what_the_peer_has(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    peer.ask(do="fill", segment_id=target, value=9)
    grant = peer.grant(target, OFFSETS[:8], BLOCK, Operation.READ)
    before = bytes(source.memory[8 * BLOCK :])
    await agent.read(peer.descriptor, grant, same_place(source, OFFSETS[:8]), priority=Priority.BACKGROUND)
    assert source.memory[: 8 * BLOCK] == b"\x09" * 8 * BLOCK
    assert source.memory[8 * BLOCK :] == before


@pytest.mark.parametrize("length", [1, 7, 4096, BLOCK - 1])
async def test_odd_lengths_and_places_arrive_whole(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int, length: int, transport: str
) -> None:
    if transport in (TO_GPU, BETWEEN_GPUS):
        pytest.skip("a GPU's copies are of multiples of 16 bytes")
    grant = peer.grant(target, (3 * BLOCK + 1,), BLOCK)
    await agent.write(peer.descriptor, grant, pieces_of(source, [5], [3 * BLOCK + 1], length))
    assert peer.checksum(target, 3 * BLOCK + 1, length) == checksum(source.memory[5 : 5 + length])


async def test_two_thousand_pieces_end_as_one_batch(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    places = tuple(range(0, 2000 * 1024, 1024))
    grant = peer.grant(target, places, 512)
    await agent.write(peer.descriptor, grant, same_place(source, places, 512))
    for place in (0, 1024 * 999, 1024 * 1999):
        assert peer.checksum(target, place, 512) == checksum(source.memory[place : place + 512])


async def test_twenty_batches_at_once_all_end(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = peer.grant(target, OFFSETS, BLOCK)
    async with asyncio.TaskGroup() as group:
        for offset in OFFSETS[:20]:
            group.create_task(agent.write(peer.descriptor, grant, same_place(source, (offset,))))
    assert peer.checksum(target, 0, 20 * BLOCK) == checksum(source.memory[: 20 * BLOCK])


async def test_small_batches_that_follow_each_other_leave_the_loop_to_others(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = peer.grant(target, OFFSETS, BLOCK)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    for _ in range(4000):
        await agent.write(peer.descriptor, grant, same_place(source, OFFSETS[:1]))
        if turns >= 4:
            break
    counting.cancel()
    assert turns >= 4


async def test_a_revoked_grant_is_stale_and_no_byte_is_touched(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    before = peer.checksum(target, 0, NUM_BLOCKS * BLOCK)
    grant = peer.grant(target, OFFSETS, BLOCK)
    peer.ask(do="revoke", generation=grant.generation)
    with pytest.raises(StaleError):
        await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))
    assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == before


async def test_a_lease_that_ran_out_is_told_and_no_byte_is_touched(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    before = peer.checksum(target, 0, NUM_BLOCKS * BLOCK)
    live = peer.num_grants()
    grant = peer.grant(target, OFFSETS, BLOCK, lease_s=0.001)
    # The peer drains it by itself when its lease ends.
    while peer.num_grants() > live:
        await asyncio.to_thread(peer.num_grants)
    with pytest.raises(LeaseExpiredError):
        await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))
    assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == before


async def test_a_guessed_generation_is_stale(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = replace(peer.grant(target, OFFSETS, BLOCK), generation=0x1234_0000)
    with pytest.raises(StaleError):
        await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))


@pytest.mark.parametrize(
    "widened",
    [
        lambda grant: replace(grant, offsets=OFFSETS),
        lambda grant: replace(grant, length=2 * BLOCK),
        lambda grant: replace(grant, segment_id=grant.segment_id ^ 1),
    ],
)
async def test_a_grant_that_was_widened_by_its_holder_is_refused_whole(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int, widened
) -> None:
    before = peer.checksum(target, 0, NUM_BLOCKS * BLOCK)
    grant: Grant = widened(peer.grant(target, (BLOCK,), BLOCK))
    requests = same_place(source, grant.offsets[-1:], grant.length)
    with pytest.raises((ProtocolError, StaleError, TransferFailedError)):
        await agent.write(peer.descriptor, grant, requests)
    assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == before


async def test_a_grant_to_write_cannot_be_read_by(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = replace(peer.grant(target, OFFSETS, BLOCK), operation=Operation.READ)
    before = bytes(source.memory)
    with pytest.raises(ProtocolError):
        await agent.read(peer.descriptor, grant, same_place(source, OFFSETS))
    assert source.memory == before


async def test_another_epoch_of_the_peer_is_not_written_to(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    grant = peer.grant(target, OFFSETS, BLOCK)
    older = replace(peer.descriptor, epoch=peer.descriptor.epoch ^ 1)
    with pytest.raises((StaleError, TransferFailedError)):
        await agent.write(older, grant, same_place(source, OFFSETS))
    await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_cancelled_write_leaves_our_memory_alone(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int, turns: int
) -> None:
    """What the peer got of it is what was there before the cancellation returned."""
    grant = peer.grant(target, OFFSETS, BLOCK)
    peer.ask(do="fill", segment_id=target, value=0)
    source.memory[:] = b"\x01" * source.num_bytes
    writing = asyncio.ensure_future(agent.write(peer.descriptor, grant, same_place(source, OFFSETS)))
    for _ in range(turns):
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait([writing])
    source.memory[:] = b"\x02" * source.num_bytes
    peer.ask(do="revoke", generation=grant.generation)
    check = peer.grant(target, OFFSETS, BLOCK, Operation.READ)
    await agent.read(peer.descriptor, check, same_place(source, OFFSETS))
    assert set(source.memory) <= {0, 1}


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_cancelled_read_writes_nothing_into_our_memory_afterwards(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int, turns: int
) -> None:
    grant = peer.grant(target, OFFSETS, BLOCK, Operation.READ)
    peer.ask(do="fill", segment_id=target, value=5)
    reading = asyncio.ensure_future(agent.read(peer.descriptor, grant, same_place(source, OFFSETS)))
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    source.memory[:] = b"\x02" * source.num_bytes
    peer.ask(do="revoke", generation=grant.generation)
    # A batch behind it on every link has ended, so has whatever was on its way before.
    other = peer.grant(target, OFFSETS[:1], BLOCK, Operation.READ)
    spare = agent.allocate(BLOCK)
    for _ in range(4):
        await agent.read(peer.descriptor, other, pieces_of(spare, [0], [0], BLOCK))
    assert set(source.memory) == {2}


async def test_after_a_revocation_returned_nothing_lands_any_more(
    agent: TransferAgent, peer: RemotePeer, source: Segment, target: int
) -> None:
    source.memory[:] = b"\x01" * source.num_bytes
    for _ in range(20):
        grant = peer.grant(target, OFFSETS, BLOCK)
        writing = asyncio.ensure_future(agent.write(peer.descriptor, grant, same_place(source, OFFSETS)))
        await asyncio.sleep(0)
        await peer.begin(do="revoke", generation=grant.generation).get()
        peer.ask(do="fill", segment_id=target, value=3)
        await asyncio.wait([writing])
        assert isinstance(writing.exception(), StaleError | None)
        expected = checksum(b"\x03" * NUM_BLOCKS * BLOCK)
        assert peer.checksum(target, 0, NUM_BLOCKS * BLOCK) == expected


async def test_no_grant_is_left_when_all_were_revoked(transport: str) -> None:
    # A peer of its own: leases that other tests left behind would run out meanwhile.
    with remote_peer(transport) as peer:
        segment_id = peer.allocate(BLOCK)
        grants = [peer.grant(segment_id, (0,), BLOCK) for _ in range(50)]
        assert peer.num_grants() == 50
        for grant in grants:
            peer.ask(do="revoke", generation=grant.generation)
        assert peer.num_grants() == 0


async def test_a_killed_peer_fails_the_batch_and_its_successor_is_reached(
    agent: TransferAgent, transport: str, source: Segment
) -> None:
    with remote_peer(transport) as first:
        grant = first.grant(first.allocate(NUM_BLOCKS * BLOCK), OFFSETS, BLOCK)
        await agent.write(first.descriptor, grant, same_place(source, OFFSETS))
        first.kill()
        with pytest.raises(TransferFailedError):
            async with asyncio.timeout(60):
                await agent.write(first.descriptor, grant, same_place(source, OFFSETS))
    with remote_peer(transport) as second:
        segment_id = second.allocate(NUM_BLOCKS * BLOCK)
        grant = second.grant(segment_id, OFFSETS, BLOCK)
        await agent.write(second.descriptor, grant, same_place(source, OFFSETS))
        assert second.checksum(segment_id, 0, NUM_BLOCKS * BLOCK) == checksum(source.memory)


async def test_a_peer_killed_in_the_middle_of_batches_is_noticed_and_stalls_nobody(
    agent: TransferAgent, transport: str, peer: RemotePeer, source: Segment, target: int
) -> None:
    begun = asyncio.Semaphore(0)
    grant = peer.grant(target, OFFSETS, BLOCK)
    others = asyncio.create_task(writes_until_failure(agent, peer, grant, source, begun))
    with remote_peer(transport, "doomed") as doomed:
        segment_id = doomed.allocate(NUM_BLOCKS * BLOCK)
        lost = doomed.grant(segment_id, OFFSETS, BLOCK)
        writers = [
            asyncio.create_task(writes_until_failure(agent, doomed, lost, source, begun)) for _ in range(3)
        ]
        # From here on batches follow each other without a pause: some are under way when it dies.
        for _ in range(4):
            await begun.acquire()
        doomed.kill()
        async with asyncio.timeout(60):
            reasons = await asyncio.gather(*writers)
    assert [type(reason) for reason in reasons] == [TransferFailedError] * 3
    async with asyncio.timeout(60):
        await agent.write(peer.descriptor, grant, same_place(source, OFFSETS))
    assert not others.done()
    others.cancel()
    await asyncio.wait([others])
    with remote_peer(transport, "doomed") as successor:
        grant = successor.grant(successor.allocate(NUM_BLOCKS * BLOCK), OFFSETS, BLOCK)
        await agent.write(successor.descriptor, grant, same_place(source, OFFSETS))


async def writes_until_failure(
    agent: TransferAgent, peer: RemotePeer, grant: Grant, source: Segment, begun: asyncio.Semaphore
) -> Exception:
    """Write one batch after the other, the first of which is told; return what ended it."""
    batch = same_place(source, OFFSETS)
    try:
        await agent.write(peer.descriptor, grant, batch)
        begun.release()
        while True:
            await agent.write(peer.descriptor, grant, batch)
    except TransferFailedError as error:
        return error
