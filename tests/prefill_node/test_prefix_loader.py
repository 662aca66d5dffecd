"""A prefix that another node holds is read from it, compared, kept, and computed where that fails."""

import asyncio
from dataclasses import replace

import pytest

from base.block_hash import hash_chain
from base.grants import Operation
from base.messages import Failed, Lend, Lent, Prefill, Prefilled, Source
from decode_node.role import DecodeRole
from prefill_node.lender import Lender
from prefill_node.role import PrefillRole
from tests.node_parts import LAYOUT, ROOT, parts, work

CHAIN = hash_chain(range(100, 180), 16, ROOT)


@pytest.fixture
async def three():
    async with (
        parts(warm=PrefillRole, cold=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        warm = made["warm"]
        warm.lender = Lender(warm.pool, warm.cache, warm.segment, warm.agent, group, warm.send)
        yield warm, made["cold"], made["decode"]
        warm.lender.release_all()


async def prefilled(part, decode, asked, source=None):
    num_blocks = LAYOUT.num_blocks(len(asked.token_ids))
    offsets = [LAYOUT.offset(block) for block in range(num_blocks)]
    grant = decode.agent.grant(decode.segment, offsets, LAYOUT.block_bytes, Operation.WRITE, 10.0)
    part.role.prefill(Prefill(asked, decode.agent.descriptor, grant, 0, source))
    answer = await part.said(Prefilled)
    await part.role.idle()
    await decode.agent.revoke(grant)
    part.sent.clear()
    return answer


async def lent(warm, first, end, name="lend"):
    warm.lender.lend(Lend(name, tuple(CHAIN[:end]), 10.0, first))
    told = await warm.said(Lent)
    return Source(warm.agent.descriptor, told.grant, told.checksums, first)


async def test_lent_blocks_are_not_computed_again_and_stay(three):
    warm, cold, decode = three
    expected = await prefilled(warm, decode, work(num_tokens=80))
    source = await lent(warm, 0, 4)
    answer = await prefilled(cold, decode, work(num_tokens=80), source)
    assert answer.num_cached_tokens == 64
    assert answer.checksums == expected.checksums
    warm.lender.release("lend")
    again = await prefilled(cold, decode, work(num_tokens=80, name="again"))
    assert again.num_cached_tokens == 64
    await warm.lender.idle()
    for part in (warm, cold):
        part.check_nothing_is_held()


async def test_only_what_is_missing_is_read(three):
    warm, cold, decode = three
    await prefilled(warm, decode, work(num_tokens=80))
    await prefilled(cold, decode, work(num_tokens=33))
    answer = await prefilled(cold, decode, work(num_tokens=80, name="b"), await lent(warm, 1, 4))
    assert answer.num_cached_tokens == 64


@pytest.mark.parametrize("trouble", ["revoked", "damaged", "peer gone", "gap"])
async def test_a_prefix_that_cannot_be_loaded_is_computed(three, trouble):
    warm, cold, decode = three
    expected = await prefilled(warm, decode, work(num_tokens=80))
    source = await lent(warm, 2 if trouble == "gap" else 0, 4)
    if trouble == "revoked":
        await warm.agent.revoke(source.grant)
    elif trouble == "damaged":
        source = replace(source, checksums=(source.checksums[0] ^ 1, *source.checksums[1:]))
    elif trouble == "peer gone":
        source = replace(source, peer=replace(source.peer, epoch=99))
    answer = await prefilled(cold, decode, work(num_tokens=80), source)
    assert answer.num_cached_tokens == 0
    assert answer.checksums == expected.checksums
    cold.check_nothing_is_held()


async def test_blocks_that_are_gone_are_not_lent(three):
    warm, _, _ = three
    warm.lender.lend(Lend("lend", tuple(CHAIN[:2]), 10.0))
    assert (await warm.said(Failed)).reason == "LostError"


async def test_a_loan_ends_by_itself(three):
    warm, _, decode = three
    await prefilled(warm, decode, work(num_tokens=80))
    warm.lender.lend(Lend("lend", tuple(CHAIN[:2]), 0.05))
    await warm.said(Lent)
    async with asyncio.timeout(5):
        await warm.lender.idle()
    warm.check_nothing_is_held()
