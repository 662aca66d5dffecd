"""The prefill role: every block lands in the reservation, whole, and nothing stays held."""

import asyncio
import threading
from array import array

import pytest

from base.block_hash import hash_chain
from base.checksum import checksum
from base.clock import SystemClock
from base.errors import LostError, TransferFailedError
from base.grants import Operation
from base.messages import Failed, Granted, Prefill, Prefilled
from base.request import FinishReason
from decode_node.role import DecodeRole
from engine.step import LaunchedChunk, LayerGroup, StepEntry
from prefill_node.role import PrefillRole
from prefill_node.sender import Destination, KvSender, PrefillObserver
from tests.engine.builders import make_sequence
from tests.node_parts import LAYOUT, ROOT, LayeredRunner, hand_over, parts, work


@pytest.fixture
async def both():
    async with parts(prefill=PrefillRole, decode=DecodeRole) as made:
        yield made["prefill"], made["decode"]


def granted(decode, num_blocks, first=0):
    """Return a grant for blocks of the decode node's memory, highest first."""
    offsets = [LAYOUT.offset(11 - index) for index in range(first, num_blocks)]
    return decode.agent.grant(decode.segment, offsets, LAYOUT.block_bytes, Operation.WRITE, 60.0)


def ask(prefill, decode, asked, grant, first_block=0):
    hand_over(prefill.role, asked, grant, decode.agent.descriptor, first_block)


async def finished(part):
    """Wait until no request is at work, and no step in flight has blocks to give back."""
    async with asyncio.timeout(60):
        await part.role.tasks.idle()
        while part.pool.num_held:
            await asyncio.sleep(0)


def content(part, offset):
    return bytes(part.segment.memory[offset : offset + LAYOUT.block_bytes])


async def test_every_block_arrives_with_its_checksum_and_the_first_token_follows(both):
    prefill, decode = both
    grant = granted(decode, 3)
    ask(prefill, decode, work(num_tokens=40), grant)
    answer = await prefill.said(Prefilled)
    assert answer.first_token.token_id == 1
    assert answer.finish_reason is None
    assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(answer.checksums)
    expected = [sum(range(100, 100 + end)) for end in (16, 32, 40)]
    assert [decode.cache.heads()[11 - block].unique().tolist() for block in range(3)] == [
        [float(value)] for value in expected
    ]
    await finished(prefill)
    assert prefill.pool.num_held == 0


async def computed(part, asked):
    """Wait until all of a prompt's blocks can be matched."""
    chain = hash_chain(asked.token_ids, 16, ROOT)
    async with asyncio.timeout(60):
        while chain[-1] not in part.pool:
            await asyncio.sleep(0)


@pytest.mark.parametrize("first_block", [0, 2, 3])
async def test_a_prompt_is_computed_before_its_blocks_are_granted_and_written_then(both, first_block):
    prefill, decode = both
    asked = work(num_tokens=40)
    prefill.role.prefill(Prefill(asked))
    await computed(prefill, asked)
    assert prefill.sent == []
    assert not decode.cache.heads()[9:].any()
    grant = granted(decode, 3, first_block) if first_block < 3 else None
    prefill.role.granted(Granted(asked.request_id, first_block, decode.agent.descriptor, grant))
    answer = await prefill.said(Prefilled)
    offsets = grant.offsets if grant else ()
    assert [checksum(content(decode, offset)) for offset in offsets] == list(answer.checksums)
    assert len(answer.checksums) == 3 - first_block
    await finished(prefill)
    assert prefill.pool.num_held == 0


async def test_a_prompt_that_ends_before_its_blocks_are_granted_holds_nothing(both):
    prefill, decode = both
    asked = work(num_tokens=40)
    prefill.role.prefill(Prefill(asked))
    await computed(prefill, asked)
    prefill.role.tasks.end(asked.request_id)
    await finished(prefill)
    prefill.role.granted(Granted(asked.request_id, 0, decode.agent.descriptor, granted(decode, 3)))
    assert prefill.sent == []
    assert prefill.pool.num_held == 0
    ask(prefill, decode, asked, granted(decode, 3))
    assert len((await prefill.said(Prefilled)).checksums) == 3


async def test_a_write_that_is_cancelled_waits_for_no_grant():
    destination = Destination()
    writes = [asyncio.ensure_future(destination.known()) for _ in range(2)]
    await asyncio.sleep(0)
    assert destination.num_waiting == 2
    writes[0].cancel()
    await asyncio.wait(writes[:1])
    assert destination.num_waiting == 1
    destination.give_up()
    with pytest.raises(TransferFailedError):
        await writes[1]
    assert destination.num_waiting == 0


async def test_blocks_that_nobody_grants_are_waited_for_until_the_deadline(both):
    prefill, _ = both
    prefill.role.prefill(Prefill(work(num_tokens=40)._replace(deadline_s=0.05)))
    assert (await prefill.said(Failed)).reason == "DeadlineError"
    await finished(prefill)
    assert prefill.pool.num_held == 0


async def test_a_prompt_that_waits_for_its_decode_node_does_not_keep_blocks_that_others_need(
    both, monkeypatch
):
    monkeypatch.setattr("engine.loop.STALL_S", 0.05)
    prefill, decode = both
    late, other = work(num_tokens=150, name="late"), work(num_tokens=64, name="other")
    prefill.role.prefill(Prefill(late))
    await computed(prefill, late)
    ask(prefill, decode, other._replace(token_ids=tuple(range(500, 564))), granted(decode, 4))
    assert (await prefill.said(Prefilled)).request_id == "other"
    failed = await prefill.said(Failed)
    assert (failed.request_id, failed.reason) == ("late", "TransferFailedError")
    await finished(prefill)
    assert prefill.pool.num_held == 0


async def test_no_more_prompts_are_given_up_for_one_that_waits_than_it_needs_the_blocks_of(both, monkeypatch):
    monkeypatch.setattr("engine.loop.STALL_S", 0.05)
    monkeypatch.setattr("engine.loop.GIVEN_S", 60.0)
    prefill, decode = both
    hung, late, other = (
        work(num_tokens, name=name)._replace(token_ids=tuple(range(at, at + num_tokens)))
        for name, at, num_tokens in (("hung", 100, 64), ("late", 300, 64), ("other", 500, 96))
    )
    for each in (hung, late):
        prefill.role.prefill(Prefill(each))
        await computed(prefill, each)
    ask(prefill, decode, other, granted(decode, 6))
    await prefill.said(Failed)
    grant = granted(decode, 12, first=8)
    prefill.role.granted(Granted(late.request_id, 0, decode.agent.descriptor, grant))
    await finished(prefill)
    assert [item.request_id for item in prefill.sent if isinstance(item, Failed)] == ["hung"]
    assert {item.request_id for item in prefill.sent if isinstance(item, Prefilled)} == {"late", "other"}
    assert prefill.pool.num_held == 0


async def test_blocks_to_write_without_a_grant_fail_the_prompt(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=40), None)
    assert (await prefill.said(Failed)).reason == "ProtocolError"


async def test_a_prefix_computed_before_is_matched_and_still_written(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=40), granted(decode, 3))
    await prefill.said(Prefilled)
    prefill.sent.clear()
    decode.segment.memory[:] = bytes(decode.segment.memory.nbytes)
    grant = granted(decode, 3)
    ask(prefill, decode, work(num_tokens=40, name="again"), grant)
    answer = await prefill.said(Prefilled)
    assert answer.num_cached_tokens == 32
    assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(answer.checksums)
    assert any(content(decode, grant.offsets[0]))


async def test_a_prompts_blocks_are_hashed_once(both, monkeypatch):
    """Of 128k tokens that holds the event loop for 20 ms."""
    prefill, decode = both
    hashed = []

    def counted(token_ids, block_size, root):
        chain = hash_chain(token_ids, block_size, root)
        hashed.extend(chain)
        return chain

    for module in ("prefill_node.prefix_loader", "engine.sequence"):
        monkeypatch.setattr(f"{module}.hash_chain", counted)
    ask(prefill, decode, work(num_tokens=40), granted(decode, 3))
    await prefill.said(Prefilled)
    assert hashed == hash_chain(range(100, 140), 16, ROOT)
    await finished(prefill)


@pytest.mark.parametrize("evict_first", [False, True])
async def test_what_another_node_keeps_is_evicted_before_what_was_computed_earlier(both, evict_first):
    prefill, decode = both
    newer = work(num_tokens=32, name="newer")
    newer = newer._replace(token_ids=newer.token_ids[::-1], evict_first=evict_first)
    for asked in (work(num_tokens=32), newer):
        ask(prefill, decode, asked, granted(decode, 2))
        await finished(prefill)
    pool = prefill.pool
    pool.release(pool.allocate(pool.num_available - 2))
    kept = [len(pool.match(hash_chain(asked.token_ids, 16, ROOT))) for asked in (work(num_tokens=32), newer)]
    assert kept == ([2, 0] if evict_first else [0, 2])


async def test_what_did_not_reach_the_other_node_is_not_evicted_first(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=32), granted(decode, 2))
    await finished(prefill)
    newer = work(num_tokens=32, name="newer")
    newer = newer._replace(token_ids=newer.token_ids[::-1], evict_first=True)
    grant = granted(decode, 2)
    await decode.agent.revoke(grant)
    ask(prefill, decode, newer, grant)
    assert (await prefill.said(Failed)).request_id == "newer"
    await finished(prefill)
    pool = prefill.pool
    pool.release(pool.allocate(pool.num_available - 2))
    # One block at least was computed before the write of the first one failed.
    assert pool.match(hash_chain(newer.token_ids, 16, ROOT))


async def test_what_ends_with_its_first_token_is_not_evicted_first(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=32), granted(decode, 2))
    await finished(prefill)
    newer = work(num_tokens=32, name="newer")
    newer = newer._replace(
        token_ids=newer.token_ids[::-1], evict_first=True, stop=newer.stop._replace(stop_token_ids=(1,))
    )
    prefill.sent.clear()
    ask(prefill, decode, newer, granted(decode, 2))
    assert (await prefill.said(Prefilled)).finish_reason is FinishReason.STOP
    await finished(prefill)
    pool = prefill.pool
    pool.release(pool.allocate(pool.num_available - 2))
    assert len(pool.match(hash_chain(newer.token_ids, 16, ROOT))) == 2


async def test_a_prompts_logprobs_come_whole_though_it_is_cached(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=40), granted(decode, 3))
    await prefill.said(Prefilled)
    for name, first_block in (("one", 0), ("two", 2)):
        prefill.sent.clear()
        grant = granted(decode, 3, first_block)
        prefill.role.prefill(Prefill(work(num_tokens=40, name=name), num_prompt_logprobs=0))
        prefill.role.granted(Granted(name, first_block, decode.agent.descriptor, grant))
        answer = await prefill.said(Prefilled)
        assert array("f", answer.prompt_logprobs.logprobs).tolist() == [float(at) for at in range(39)]
        assert answer.num_cached_tokens == 0
        sums = [checksum(content(decode, offset)) for offset in grant.offsets]
        assert sums == list(answer.checksums)


async def test_blocks_that_the_decode_node_has_are_not_written(both):
    prefill, decode = both
    grant = granted(decode, 3, first=2)
    ask(prefill, decode, work(num_tokens=40), grant, first_block=2)
    answer = await prefill.said(Prefilled)
    assert len(answer.checksums) == 1
    assert checksum(content(decode, grant.offsets[0])) == answer.checksums[0]


async def test_nothing_to_write_needs_no_grant(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=32), None, first_block=2)
    assert (await prefill.said(Prefilled)).checksums == ()


async def test_tokens_generated_elsewhere_are_computed_like_the_prompt(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=30, max_tokens=9, generated=(5, 6)), granted(decode, 2))
    assert (await prefill.said(Prefilled)).first_token.token_id == 3


async def test_a_reservation_that_is_gone_fails_the_request_and_holds_nothing(both):
    prefill, decode = both
    grant = granted(decode, 3)
    await decode.agent.revoke(grant)
    ask(prefill, decode, work(num_tokens=40), grant)
    assert (await prefill.said(Failed)).reason == "StaleError"
    await finished(prefill)
    prefill.check_nothing_is_held()


@pytest.mark.parametrize("wait_for_a_step", [False, True])
async def test_a_release_at_any_stage_gives_everything_back(both, wait_for_a_step):
    prefill, decode = both
    stepped = asyncio.Event()
    prefill.pool.on_release(stepped.set)
    ask(prefill, decode, work(num_tokens=150), granted(decode, 10))
    if wait_for_a_step:
        async with asyncio.timeout(60):
            await stepped.wait()
    prefill.role.tasks.end("r")
    await finished(prefill)
    prefill.check_nothing_is_held()


async def test_a_step_that_breaks_loses_the_request_and_holds_nothing(both):
    prefill, decode = both
    prefill.runner.broken = True
    ask(prefill, decode, work(), granted(decode, 3))
    assert (await prefill.said(Failed)).reason == "LostError"
    await finished(prefill)
    prefill.check_nothing_is_held()


async def test_a_prompt_that_can_never_fit_is_refused(both):
    prefill, decode = both
    ask(prefill, decode, work(num_tokens=500), granted(decode, 3))
    assert (await prefill.said(Failed)).reason == "InvalidRequestError"


async def test_layers_leave_while_later_ones_compute():
    async with parts(runner_class=LayeredRunner, prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        grant = granted(decode, 1)
        ask(prefill, decode, work(num_tokens=16), grant)
        block = decode.cache.heads()[11]
        async with asyncio.timeout(60):
            while not block[0].any():
                await asyncio.sleep(0)
        assert not block[1].any(), "the second layer is not computed yet"
        assert not any(isinstance(item, Prefilled) for item in prefill.sent)
        prefill.runner.may_end.set()
        answer = await prefill.said(Prefilled)
        assert block.unique().tolist() == [float(sum(range(100, 116)))]
        assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(answer.checksums)
        decode.runner.may_end.set()


@pytest.mark.parametrize("num_tokens", [1, 16, 40, 150])
async def test_a_prompt_that_was_sent_by_layers_arrives_whole(num_tokens):
    async with parts(runner_class=LayeredRunner, prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        for part in (prefill, decode):
            part.runner.may_end.set()
        num_blocks = LAYOUT.num_blocks(num_tokens)
        for name in ("first", "again, with a matched prefix"):
            grant = granted(decode, num_blocks)
            decode.segment.memory[:] = bytes(decode.segment.memory.nbytes)
            prefill.sent.clear()
            ask(prefill, decode, work(num_tokens=num_tokens, name=name), grant)
            answer = await prefill.said(Prefilled)
            assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(answer.checksums)
            ends = [min(16 * (block + 1), num_tokens) for block in range(num_blocks)]
            assert [decode.cache.heads()[11 - block].unique().tolist() for block in range(num_blocks)] == [
                [float(sum(range(100, 100 + end)))] for end in ends
            ]
            await decode.agent.revoke(grant)
        await finished(prefill)
        assert prefill.pool.num_held == 0


async def test_a_release_while_layers_leave_gives_everything_back():
    async with parts(runner_class=LayeredRunner, prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        ask(prefill, decode, work(num_tokens=40), granted(decode, 3))
        async with asyncio.timeout(60):
            while not decode.cache.heads()[11][0].any():
                await asyncio.sleep(0)
        prefill.role.tasks.end("r")
        prefill.runner.may_end.set()
        decode.runner.may_end.set()
        await finished(prefill)
        prefill.check_nothing_is_held()


def sending(both, num_blocks, observers=()):
    """Return a sender of so many blocks and its grant."""
    prefill, decode = both
    grant = granted(decode, num_blocks)
    asked, destination = work(num_tokens=16 * num_blocks), Destination()
    destination.granted(Granted(asked.request_id, 0, decode.agent.descriptor, grant))
    return KvSender(prefill.kv, prefill.pool, asked, destination, SystemClock(), observers), grant


class Written(PrefillObserver):
    def __init__(self):
        self.parts = []

    def wrote(self, part, num_blocks, begun_at_s):
        self.parts.append((part, num_blocks))


async def test_blocks_that_were_preempted_before_they_were_sent_are_sent_when_they_are_computed_again(both):
    prefill, decode = both
    written = Written()
    sender, grant = sending(both, 2, [written])
    async with asyncio.TaskGroup() as writes:
        sender.send_finished(writes.create_task, [], 32)
        assert prefill.pool.num_held == 0
        computed = prefill.pool.allocate(2)
        prefill.cache.heads()[computed] = 7
        sender.send_finished(writes.create_task, computed, 32)
    assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(sender.checksums)
    assert decode.cache.heads()[11].unique().tolist() == [7.0]
    assert written.parts == [(prefill.kv.whole, 2)], "an observer is notified of what was written, once"
    prefill.pool.release(computed)
    assert prefill.pool.num_held == 0


async def test_blocks_of_a_chunk_whose_sequence_was_preempted_since_are_somebody_elses(both):
    prefill, decode = both
    sender, _ = sending(both, 2)
    sequence, groups = make_sequence("r", range(32)), (LayerGroup(0, LAYOUT.num_layers, lambda: None),)
    others = prefill.pool.allocate(2)
    prefill.cache.heads()[others] = 7
    async with asyncio.TaskGroup() as writes:
        chunk = LaunchedChunk(StepEntry(sequence, 0, 32, tuple(others), True), groups)
        sender.send_launched(writes.create_task, chunk)
    assert not decode.cache.heads().any()
    prefill.pool.release(others)
    assert prefill.pool.num_held == 0


async def test_a_chunk_under_way_that_reports_no_layers_is_sent_with_those_of_the_one_behind_it(both):
    prefill, decode = both
    sender, grant = sending(both, 3)
    blocks = prefill.pool.allocate(3)
    sequence = make_sequence("r", range(48))
    sequence.num_computed_tokens, sequence.block_table = 16, list(blocks)
    prefill.cache.heads()[blocks[:1]] = 7

    may_end = threading.Event()

    def compute_both() -> None:
        assert may_end.wait(60)
        prefill.cache.heads()[blocks[1:]] = 7

    groups = (LayerGroup(0, LAYOUT.num_layers, compute_both),)
    async with asyncio.TaskGroup() as writes:
        chunk = LaunchedChunk(StepEntry(sequence, 16, 16, tuple(blocks), False), ())
        sender.send_launched(writes.create_task, chunk)
        chunk = LaunchedChunk(StepEntry(sequence, 32, 16, tuple(blocks), True), groups)
        sender.send_launched(writes.create_task, chunk)
        while not decode.cache.heads()[11].any():
            await asyncio.sleep(0)
        for _ in range(200):  # what may leave now does
            await asyncio.sleep(0)
        may_end.set()
    assert [checksum(content(decode, offset)) for offset in grant.offsets] == list(sender.checksums)
    assert [decode.cache.heads()[11 - block].unique().tolist() for block in range(3)] == [[7.0]] * 3
    prefill.pool.release(blocks)
    assert prefill.pool.num_held == 0


async def test_blocks_of_a_write_that_never_began_are_given_back(both):
    prefill, _ = both
    sender, _ = sending(both, 2)
    computed = prefill.pool.allocate(2)

    async def broken():
        async with asyncio.TaskGroup() as writes:
            sender.send_finished(writes.create_task, computed, 32)
            raise LostError("the group ends before its tasks begin")

    with pytest.raises(BaseExceptionGroup):
        await broken()
    prefill.pool.release(computed)
    assert prefill.pool.num_held == 0


async def test_a_device_that_fails_while_layers_leave_loses_the_request_and_is_no_bug(caplog):
    async with parts(runner_class=LayeredRunner, prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        prefill.runner.is_broken = True
        for part in (prefill, decode):
            part.runner.may_end.set()
        ask(prefill, decode, work(num_tokens=40), granted(decode, 3))
        assert (await prefill.said(Failed)).reason == "LostError"
        await finished(prefill)
        prefill.check_nothing_is_held()
    assert "request broke" not in caplog.text
