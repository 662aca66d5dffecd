"""The stub node lends what it has, and who loads it from there computes the rest alone."""

import asyncio

from base.block_hash import hash_chain
from base.grants import Operation, PeerDescriptor
from base.messages import Failed, Lend, Lent, Prefill, Prefilled, Source, Work
from base.request import RequestId, SamplingParams, StopParams
from bench.overload import stub_profile
from bench.stub_node import StubNode
from conductor.placing.cost_model import CostModel

BLOCK_SIZE, ROOT = 32, b"\0" * 16
PROMPT = tuple(range(100))


def prompt_of(name, source=None):
    asked = SamplingParams(), StopParams(max_tokens=1)
    work = Work(RequestId(name), PROMPT, len(PROMPT), ROOT, *asked, None, 0, 60.0)
    return Prefill(work, source)


async def test_a_prefix_is_lent_as_far_as_it_is_there_and_loaded():
    sent = [asyncio.Queue(), asyncio.Queue()]
    warm, cold = (StubNode(CostModel(stub_profile()), 100, BLOCK_SIZE) for _ in sent)
    warm.send, cold.send = (queue.put_nowait for queue in sent)
    chain = tuple(hash_chain(PROMPT, BLOCK_SIZE, ROOT))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = [group.create_task(node.run()) for node in (warm, cold)]
        warm.receive([Lend(RequestId("too early"), chain, 10.0)])
        refused = await sent[0].get()
        warm.receive([prompt_of("first")])
        assert isinstance(await sent[0].get(), Prefilled)
        warm.receive([Lend(RequestId("lend"), (*chain, b"another's"), 10.0, 1)])
        lent = await sent[0].get()
        source = Source(PeerDescriptor("warm", 1, ()), lent.grant, lent.checksums, 0)
        cold.receive([prompt_of("second", source)])
        prefilled = await sent[1].get()
        for task in running:
            task.cancel()
    assert isinstance(refused, Failed)
    assert isinstance(lent, Lent)
    assert lent.grant.operation is Operation.READ
    assert len(lent.grant.offsets) == len(lent.checksums) == 2, "of three blocks those after the first"
    assert prefilled.num_cached_tokens == 2 * BLOCK_SIZE
