"""A node changes its role under load, in virtual time, and no request is lost."""

import asyncio
import random

from base.request import Request, RequestId, Role, SamplingParams, StopParams
from bench.overload import CAPACITY
from conductor.placing.roles import RoleSettings
from conductor.placing.scheduler_settings import SchedulerSettings
from tests.conductor.stub_cluster import cluster
from tests.conductor.virtual_loop import run

SETTINGS = SchedulerSettings(ahead_s=0.2)
ROLES = RoleSettings(ttft_target_s=0.3, tbt_target_s=0.05, hold_s=4.0, pause_s=8.0, smoothing_s=2.0)


async def tokens_of(dispatcher, name, prompt, max_tokens):
    request = Request(RequestId(name), prompt, SamplingParams(), StopParams(max_tokens))
    return sum([len(piece.tokens) async for piece in dispatcher.generate(request)])


def test_a_decode_node_prefills_when_prompts_pile_up_and_no_request_is_lost():
    async def scenario(clock):
        rng = random.Random(2)
        seen = []
        async with cluster(clock, SETTINGS, 1, 3, ROLES) as (dispatcher, view), asyncio.TaskGroup() as group:
            tasks = []
            for number in range(500):
                await asyncio.sleep(rng.expovariate(CAPACITY * 0.75))
                prompt = tuple(rng.randrange(9_000) for _ in range(200))
                tasks.append(group.create_task(tokens_of(dispatcher, f"r{number}", prompt, 8)))
                seen.append((view.prefill_mask.bit_count(), view.decode_mask.bit_count()))
            counts = await asyncio.gather(*tasks)
            roles = [node.info.roles for node in view.nodes()]
        return seen, counts, roles

    seen, counts, roles = run(scenario)
    assert seen[0] == (1, 3)
    assert (1, 2) in seen, "the node was not drained first"
    assert roles.count(frozenset({Role.PREFILL})) >= 2
    assert frozenset({Role.DECODE}) in roles
    assert counts == [8] * 500
