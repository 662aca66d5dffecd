"""`conductor doctor` has KV sent over each pair of nodes: as a request would, and nothing of it is kept."""

import random

from base.messages import Granted, Prefill, Release, Reserve
from base.request import Role
from conductor.serving.link_check import LinkCheck
from tests.conductor.dispatching import conductor, until
from tests.conductor.scripted_node import ScriptedWork


async def measured(prefill, decode, name="p,d"):
    async with conductor() as running:
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        told = await LinkCheck(running.membership, random.Random(1)).measure(name)
        await until(lambda: not prefill.held() and not decode.held())
        return told


async def test_a_prompt_goes_from_the_one_to_the_other_and_is_let_go_of():
    prefill, decode = ScriptedWork(), ScriptedWork()
    assert await measured(prefill, decode) == {"blocks": 2, "problem": ""}
    assert [type(item) for item in decode.received] == [Reserve, Release]
    assert [type(item) for item in prefill.received] == [Prefill, Granted]
    prompt, granted = prefill.received
    assert (granted.request_id, granted.target.node_id) == (prompt.work.request_id, "d")
    assert prompt.work.chain_root == decode.received[0].work.chain_root


async def test_what_a_node_refuses_is_told():
    told = await measured(ScriptedWork(), ScriptedWork(is_full=True))
    assert told == {"blocks": 0, "problem": "CapacityError: another conductor was there first"}


async def test_a_node_that_is_not_there_is_not_known():
    assert await measured(ScriptedWork(), ScriptedWork(), "p,x") is None
    assert await measured(ScriptedWork(), ScriptedWork(), "p") is None


async def test_two_checks_hang_on_roots_that_nothing_shares():
    prefill, decode = ScriptedWork(), ScriptedWork()
    async with conductor() as running:
        await running.attach(prefill, node_id="p", roles=[Role.PREFILL])
        await running.attach(decode, node_id="d", roles=[Role.DECODE])
        check = LinkCheck(running.membership, random.Random(1))
        for _ in range(2):
            assert await check.measure("p,d")
        first, second = (item.work.chain_root for item in prefill.received if isinstance(item, Prefill))
        assert first != second
