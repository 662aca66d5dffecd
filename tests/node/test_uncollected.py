"""What a node held for a request is free at once, however the request ended.

Its frames have all of it, and the garbage collector comes when ten thousand objects have been made: then it
takes its time from everybody.
"""

import asyncio

import pytest

from base.clock import SystemClock
from base.errors import ChecksumError
from base.grants import Operation
from base.messages import Failed, Prefilled, Reserve, Reserved, Start
from decode_node.role import DecodeRole
from engine.sequence import Sequence
from prefill_node.role import PrefillRole
from tests.decode_node.test_role import ShardInOrder, finished, write_kv
from tests.node_parts import LAYOUT, LayeredRunner, hand_over, parts, work
from tests.prefill_node.test_prefix_loader import WaitingRunner
from tests.uncollected import uncollected
from transfer.shard import NodeKv


def ask(prefill, decode, **fields):
    """Ask for a prompt of ten chunks; return the grant to write it."""
    offsets = [LAYOUT.offset(block) for block in range(10)]
    grant = decode.agent.grant(decode.segment, offsets, LAYOUT.block_bytes, Operation.WRITE, 60.0)
    hand_over(prefill.role, work(num_tokens=150, **fields), grant, decode.agent.descriptor)
    return grant


async def ended(part):
    """Return when no request is at work, and the turn in which the last one ended is over."""
    await finished(part)
    await asyncio.sleep(0)


def check(left):
    assert left((BaseException, Sequence)) == []


@pytest.mark.parametrize("fault", ["released early", "released", "revoked", "broken", "out of time"])
async def test_a_prompt_that_is_not_computed_leaves_nothing_to_collect(fault):
    async with parts(prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        stepped = asyncio.Event()
        prefill.pool.on_release(stepped.set)
        with uncollected() as left:
            prefill.runner.broken = fault == "broken"
            grant = ask(prefill, decode, **{"deadline_s": 0.0} if fault == "out of time" else {})
            if fault == "released":
                await asyncio.wait_for(stepped.wait(), 60)
                prefill.role.tasks.end("r")
            elif fault == "revoked":
                await decode.agent.revoke(grant)
            elif fault == "released early":
                prefill.role.tasks.end("r")
            await ended(prefill)
            check(left)


async def test_a_device_that_fails_while_layers_leave_leaves_nothing_to_collect():
    async with parts(runner_class=LayeredRunner, prefill=PrefillRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        with uncollected() as left:
            prefill.runner.is_broken = True
            prefill.runner.may_end.set()
            ask(prefill, decode)
            await prefill.said(Failed)
            await ended(prefill)
            check(left)


@pytest.mark.parametrize("fault", ["released early", "released", "damaged", "broken", "full"])
async def test_an_answer_that_is_not_generated_leaves_nothing_to_collect(fault):
    async with parts(prefill=DecodeRole, decode=DecodeRole) as made:
        prefill, decode = made["prefill"], made["decode"]
        decode.runner.broken = fault == "broken"
        with uncollected() as left:
            decode.role.reserve(Reserve(work(num_tokens=1000 if fault == "full" else 32)))
            if fault == "released early":
                await asyncio.sleep(0)
            elif fault != "full":
                grant = (await decode.said(Reserved)).grant
                sums = await write_kv(prefill, decode, grant)
                if fault != "released":
                    decode.role.start(Start("r", 7, (0,) * len(sums) if fault == "damaged" else sums))
            if fault.startswith("released"):
                decode.role.tasks.end("r")
            await ended(decode)
            check(left)


async def test_sums_that_were_taken_while_steps_ran_leave_nothing_to_collect():
    async with parts(prefill=DecodeRole, decode=DecodeRole) as made, asyncio.TaskGroup() as group:
        prefill, decode = made["prefill"], made["decode"]
        shard = ShardInOrder(decode.kv.shards[0])
        shard.told.set()
        decode.role = DecodeRole(decode.loop, NodeKv(LAYOUT, (shard,)), group, decode.send, SystemClock())
        with uncollected() as left:
            decode.role.reserve(Reserve(work(num_tokens=32)))
            sums = await write_kv(prefill, decode, (await decode.said(Reserved)).grant)
            decode.role.start(Start("r", 7, (0,) * len(sums)))
            assert (await decode.said(Failed)).reason == "ChecksumError"
            await ended(decode)
            check(left)


class DamagedSource:
    """A prefix that is there at once, and proves wrong."""

    def computed(self, num_tokens, seconds):
        pass

    def offer(self, chain, root):
        pass

    async def reach(self, chain, first):
        return len(chain)

    async def load(self, chain, block_ids, first, stripes=None):
        if stripes is None:
            raise ChecksumError("damaged")
        stripes.on_arrived(LAYOUT.num_layers)
        await asyncio.sleep(0)
        raise ChecksumError("damaged")


async def test_a_prefix_that_proves_wrong_leaves_nothing_to_collect():
    async with (
        parts(WaitingRunner, prefill=PrefillRole, decode=DecodeRole) as made,
        asyncio.TaskGroup() as group,
    ):
        prefill, decode = made["prefill"], made["decode"]
        source = DamagedSource()
        prefill.role = PrefillRole(prefill.loop, prefill.kv, group, prefill.send, SystemClock(), None, source)
        with uncollected() as left:
            ask(prefill, decode)
            await prefill.said(Prefilled)
            await ended(prefill)
            check(left)
