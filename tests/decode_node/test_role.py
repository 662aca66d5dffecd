"""The decode role: what it reserves, when it starts, and that it gives everything back."""

import asyncio

import pytest

from base.block_hash import hash_chain
from base.checksum import checksum
from base.clock import SystemClock
from base.grants import Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvPart
from base.messages import Failed, Reserve, Reserved, Start, Tokens
from base.request import FinishReason
from decode_node.reservation import reserved as blocks_reserved
from decode_node.role import DecodeRole
from engine.block_pool import BlockPool
from tests.node_parts import LAYOUT, NUM_BLOCKS, ROOT, parts, work
from transfer.batch import pieces_of
from transfer.shard import NodeKv


async def reserved(part, asked):
    part.role.reserve(Reserve(asked))
    return await part.said(Reserved)


async def write_kv(writer, owner, grant):
    """Write something into every granted block; return the checksums."""
    segment = writer.agent.allocate(len(grant.offsets) * grant.length)
    segment.memory[:] = bytes(index % 251 for index in range(segment.memory.nbytes))
    batch = pieces_of(segment, range(0, segment.num_bytes, grant.length), grant.offsets, grant.length)
    await writer.agent.write(owner.agent.descriptor, grant, batch, 60.0)
    return tuple(
        checksum(segment.memory[start : start + grant.length])
        for start in range(0, segment.memory.nbytes, grant.length)
    )


async def received(prefill, decode, asked):
    """Bring a request to where it generates; return what was reserved."""
    reservation = await reserved(decode, asked)
    sums = await write_kv(prefill, decode, reservation.grant)
    decode.role.start(Start(asked.request_id, 7, sums))
    return reservation


async def finished(part):
    """Wait until no request is at work, and no step in flight has blocks to give back."""
    async with asyncio.timeout(60):
        await part.role.tasks.idle()
        while part.pool.num_held:
            await asyncio.sleep(0)


@pytest.fixture
async def both():
    async with parts(prefill=DecodeRole, decode=DecodeRole) as made:
        yield made["prefill"], made["decode"]


async def test_a_reservation_grants_exactly_the_blocks_of_the_prompt(both):
    _, decode = both
    reservation = await reserved(decode, work(num_tokens=40))
    assert reservation.num_matched_blocks == 0
    assert len(reservation.grant.offsets) == 3
    assert reservation.grant.length == LAYOUT.block_bytes
    assert decode.pool.num_held == 3


async def test_tokens_follow_the_first_one_until_the_limit(both):
    prefill, decode = both
    await received(prefill, decode, work(max_tokens=4))
    await finished(decode)
    told = [item for item in decode.sent if isinstance(item, Tokens)]
    assert [token.token_id for item in told for token in item.tokens] == [2, 3, 4]
    assert [item.finish_reason for item in told] == [None, None, FinishReason.LENGTH]
    decode.check_nothing_is_held()


async def test_blocks_received_before_need_no_grant(both):
    prefill, decode = both
    await received(prefill, decode, work(num_tokens=32))
    await finished(decode)
    decode.sent.clear()
    again = await reserved(decode, work(num_tokens=32, name="again"))
    assert (again.num_matched_blocks, again.grant) == (2, None)
    decode.role.start(Start("again", 7, ()))
    await finished(decode)
    assert any(isinstance(item, Tokens) for item in decode.sent)
    decode.check_nothing_is_held()


@pytest.mark.parametrize("evict_first", [False, True])
async def test_what_another_node_keeps_is_evicted_before_what_came_earlier(both, evict_first):
    prefill, decode = both
    await received(prefill, decode, work(num_tokens=32, name="older"))
    await finished(decode)
    decode.sent.clear()
    newer = work(num_tokens=33, name="newer")
    newer = newer._replace(token_ids=newer.token_ids[::-1], evict_first=evict_first)
    await received(prefill, decode, newer)
    await finished(decode)
    pool = decode.pool
    pool.release(pool.allocate(pool.num_available - 2))
    kept = [len(pool.match(hash_chain(asked.token_ids, 16, ROOT))) for asked in (work(num_tokens=32), newer)]
    assert kept == ([2, 0] if evict_first else [0, 2])


async def test_damaged_blocks_are_refused_and_never_published(both):
    prefill, decode = both
    reservation = await reserved(decode, work(num_tokens=32))
    sums = await write_kv(prefill, decode, reservation.grant)
    decode.role.start(Start("r", 7, (sums[0], sums[1] ^ 1)))
    failed = await decode.said(Failed)
    assert failed.reason == "ChecksumError"
    assert "block 1" in failed.message
    await finished(decode)
    decode.check_nothing_is_held()
    decode.sent.clear()
    assert (await reserved(decode, work(num_tokens=32, name="b"))).num_matched_blocks == 0


async def test_what_was_computed_from_a_damaged_block_is_not_told(both):
    prefill, decode = both
    reservation = await reserved(decode, work(num_tokens=40, max_tokens=3))
    sums = await write_kv(prefill, decode, reservation.grant)
    decode.role.start(Start("r", 7, (sums[0] ^ 1, *sums[1:])))
    assert (await decode.said(Failed)).reason == "ChecksumError"
    await finished(decode)
    assert not any(isinstance(item, Tokens) for item in decode.sent)
    decode.check_nothing_is_held()


async def test_a_step_writes_to_no_block_before_it_is_verified(both):
    prefill, decode = both
    reservation = await reserved(decode, work(num_tokens=40, max_tokens=3))
    sums = await write_kv(prefill, decode, reservation.grant)
    decode.role.start(Start("r", 7, (*sums[:2], sums[2] ^ 1)))
    assert "block 2" in (await decode.said(Failed)).message
    assert decode.loop.num_steps == 0
    await finished(decode)
    decode.check_nothing_is_held()


class ShardInOrder:
    """A shard of a GPU, as far as a role sees it: sums of what the blocks are now, told later."""

    def __init__(self, shard):
        self.shard = shard
        self.part = shard.part
        self.grant, self.revoke = shard.grant, shard.revoke
        self.told = asyncio.Event()

    def sums_in_order(self, block_ids, part):
        async def after(taken):
            await self.told.wait()
            return await taken

        return after(asyncio.ensure_future(self.shard.sums(block_ids, part)))


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_steps_run_and_nothing_is_told_until_the_sums_are(both, is_damaged):
    prefill, decode = both
    shard = ShardInOrder(decode.kv.shards[0])
    async with asyncio.TaskGroup() as group:
        decode.role = DecodeRole(decode.loop, NodeKv(LAYOUT, (shard,)), group, decode.send, SystemClock())
        reservation = await reserved(decode, work(num_tokens=32, max_tokens=3))
        sums = await write_kv(prefill, decode, reservation.grant)
        decode.role.start(Start("r", 7, (sums[0] ^ is_damaged, sums[1])))
        async with asyncio.timeout(60):
            while decode.loop.num_steps < 2:
                await asyncio.sleep(0)
        assert not any(isinstance(item, Tokens) for item in decode.sent)
        assert not decode.pool.num_cached
        assert decode.pool.num_held
        assert not decode.pool.num_shared, "the one sequence shares nothing with its proof"
        shard.told.set()
        await decode.said(Failed if is_damaged else Tokens)
        await finished(decode)
    assert any(isinstance(item, Tokens) for item in decode.sent) != is_damaged
    assert bool(decode.pool.num_cached) != is_damaged
    decode.check_nothing_is_held()


async def test_a_start_that_lacks_checksums_is_refused(both):
    _, decode = both
    await reserved(decode, work(num_tokens=32))
    decode.role.start(Start("r", 7, ()))
    assert (await decode.said(Failed)).reason == "ChecksumError"


async def test_more_than_the_pool_has_is_refused_and_takes_nothing(both):
    _, decode = both
    decode.role.reserve(Reserve(work(num_tokens=16 * (NUM_BLOCKS + 1))))
    assert (await decode.said(Failed)).reason == "CapacityError"
    await finished(decode)
    decode.check_nothing_is_held()


@pytest.mark.parametrize("stage", ["before it runs", "reserved", "started", "generating"])
async def test_a_release_at_any_stage_gives_everything_back(both, stage):
    prefill, decode = both
    asked = work(max_tokens=100)
    if stage == "before it runs":
        decode.role.reserve(Reserve(asked))
    elif stage == "reserved":
        await reserved(decode, asked)
    else:
        await received(prefill, decode, asked)
        if stage == "generating":
            await decode.said(Tokens)
    decode.role.tasks.end("r")
    await finished(decode)
    decode.check_nothing_is_held()
    assert not [item for item in decode.sent if isinstance(item, Failed)]


class GrantingShard:
    """What one rank has; its grant ends when the test lets it."""

    def __init__(self, head):
        self.part = KvPart(0, LAYOUT.num_layers, head, 1)
        self.may_end, self.is_granted = asyncio.Event(), False

    async def grant(self, block_ids, lease_s):
        self.is_granted = True
        peer = PeerDescriptor("rank", 1, ())
        return RankGrant(peer, self.part, Grant(1, 2, Operation.WRITE, (0,), LAYOUT.block_bytes, lease_s))

    async def revoke(self, grant):
        await self.may_end.wait()
        self.is_granted = False


async def test_nobody_may_write_to_any_rank_when_blocks_come_free_of_who_is_cancelled_twice():
    """A release and a deadline come at one moment."""
    pool, shards = BlockPool(2), (GrantingShard(0), GrantingShard(1))
    begun = asyncio.Event()

    async def hold():
        async with blocks_reserved(pool, NodeKv(LAYOUT, shards), work(num_tokens=16)):
            begun.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await asyncio.wait_for(begun.wait(), 60)
    for _ in range(2):
        holding.cancel()
        await asyncio.sleep(0)
    assert pool.num_held == 1
    for shard in shards:
        shard.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(holding, 60)
    assert (pool.num_held, [shard.is_granted for shard in shards]) == (0, [False, False])


async def test_a_write_after_the_release_is_refused(both):
    prefill, decode = both
    reservation = await reserved(decode, work())
    decode.role.tasks.end("r")
    await finished(decode)
    before = bytes(decode.segment.memory)
    with pytest.raises(Exception, match=r"stale|revoked|grant|generation"):
        await write_kv(prefill, decode, reservation.grant)
    assert bytes(decode.segment.memory) == before


async def test_a_request_whose_time_runs_out_is_told_so_and_gives_everything_back(both):
    _, decode = both
    deadline_s = 0.1
    # Once at least it runs out behind the reservation: a process that stands still is given twice as much.
    while not any(isinstance(item, Reserved) for item in decode.sent):
        decode.sent.clear()
        decode.role.reserve(Reserve(work(deadline_s=deadline_s)))
        assert (await decode.said(Failed)).reason == "DeadlineError"
        await finished(decode)
        decode.check_nothing_is_held()
        deadline_s *= 2


async def test_a_step_that_breaks_loses_the_request_and_holds_nothing(both):
    prefill, decode = both
    decode.runner.broken = True
    await received(prefill, decode, work())
    assert (await decode.said(Failed)).reason == "LostError"
    await finished(decode)
    decode.check_nothing_is_held()
