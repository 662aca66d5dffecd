"""Nodes change roles under load, in virtual time: no drain, no request lost, whatever a node is at."""

import asyncio
import random

from base.request import Request, RequestId, Role, SamplingParams, StopParams
from bench.overload import CAPACITY
from bench.virtual_cluster import node_infos, virtual_cluster
from bench.virtual_loop import run
from conductor.placing.scheduler_settings import SchedulerSettings

FOLLOW = SchedulerSettings(ahead_s=0.2, roles_follow=True)


async def tokens_of(dispatcher, name, prompt, max_tokens):
    request = Request(RequestId(name), prompt, SamplingParams(), StopParams(max_tokens))
    return sum([len(piece.tokens) async for piece in dispatcher.generate(request)])


def served(settings, num_requests, rate, prompt_tokens, max_tokens, num_prefill=1, num_decode=3):
    """Return the sizes of the pools at each arrival, the tokens of each answer, and the nodes' roles."""

    async def scenario(clock):
        rng = random.Random(2)
        seen = []
        nodes = virtual_cluster(clock, settings, node_infos(num_prefill, num_decode))
        async with nodes as (dispatcher, view), asyncio.TaskGroup() as group:
            tasks = []
            for number in range(num_requests):
                await asyncio.sleep(rng.expovariate(rate))
                prompt = tuple(rng.randrange(9_000) for _ in range(prompt_tokens))
                tasks.append(group.create_task(tokens_of(dispatcher, f"r{number}", prompt, max_tokens)))
                seen.append((view.prefill_mask.bit_count(), view.decode_mask.bit_count()))
            counts = await asyncio.gather(*tasks)
            roles = [node.info.roles for node in view.nodes()]
        return seen, counts, roles

    return run(scenario)


def test_decode_nodes_prefer_prompts_when_those_pile_up_and_no_request_is_lost():
    seen, counts, roles = served(FOLLOW, 600, CAPACITY * 1.2, 200, 8)
    assert seen[0] == (1, 3)
    assert {sum(sizes) for sizes in seen} == {4}, "a node was drained"
    assert roles.count(frozenset({Role.PREFILL})) >= 2
    assert frozenset({Role.DECODE}) in roles
    assert counts == [8] * 600


def test_roles_stay_where_load_is_even_and_where_they_are_fixed():
    seen, counts, _ = served(FOLLOW, 60, CAPACITY * 0.1, 200, 8, 2, 2)
    assert (set(seen), counts) == ({(2, 2)}, [8] * 60)
    fixed = FOLLOW.__class__(ahead_s=0.2)
    seen, counts, _ = served(fixed, 300, CAPACITY * 0.75, 200, 8)
    assert (set(seen), counts) == ({(1, 3)}, [8] * 300)
