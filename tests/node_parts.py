"""The parts of a node without a model: a runner that makes tokens up, all else real."""

from __future__ import annotations

import asyncio
import threading
from array import array
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import torch

from base.block_hash import chain_root
from base.clock import SystemClock
from base.config import TransferConfig
from base.kv_layout import KvPart, head_layout
from base.messages import Granted, Prefill, Work
from base.prompt_logprobs import PromptLogprobs
from base.request import Pooling, SampledToken, SamplingParams, StopParams
from engine.block_pool import BlockPool
from engine.block_sums import block_sums
from engine.loop import EngineLoop
from engine.paged_cache import PagedCache
from engine.runner import StepRunner
from engine.scheduler import Scheduler
from engine.step import LaunchedStep, LayerGroup, StepResult
from node.own_cache import LentPrefix, SegmentCache
from prefill_node.role import PrefillRole
from transfer.agent import TransferAgent
from transfer.shard import LocalShard, NodeKv

LAYOUT = head_layout(num_layers=2, num_heads=1, head_dim=4, block_size=16, dtype="float32")
ROOT = chain_root("model", LAYOUT.layout_id)
NUM_BLOCKS = 12
WHOLE = KvPart(0, LAYOUT.num_layers, 0, LAYOUT.num_heads)


class CountingRunner(StepRunner):
    """Samples 1, 2, 3 ...; writes into each block it computes the hash of what it is for.

    `broken` makes every step raise. Row i says that the prompt's token after it has the log probability i,
    and has its token for a hidden state.
    """

    can_score = True
    poolings = tuple(Pooling)

    def __init__(self, cache):
        self._cache = cache
        self.broken = False

    def execute(self, plan):
        if self.broken:
            raise RuntimeError("the device is on fire")
        for layer in range(LAYOUT.num_layers):
            self.compute(plan, layer)
        return self.sampled(plan)

    def compute(self, plan, layer):
        for entry in plan.entries:
            for block in range(entry.start // 16, -(-entry.context_len // 16)):
                content = sum(entry.sequence.token_ids[: min((block + 1) * 16, entry.context_len)])
                self._cache.heads()[:, layer][entry.block_table[block]] = content

    def sampled(self, plan):
        return StepResult(
            tuple(
                SampledToken(entry.sequence.num_generated_tokens + 1) if entry.samples else None
                for entry in plan.entries
            ),
            prompt_logprobs=tuple(
                PromptLogprobs(array("f", range(entry.start, entry.start + entry.num_scored)).tobytes())
                for entry in plan.entries
            ),
            pooled=tuple(
                np.array([float(sum(entry.sequence.token_ids[at] for at in entry.pooled))])
                if entry.pooled
                else None
                for entry in plan.entries
            ),
        )


class LayeredRunner(StepRunner):
    """Computes a launched step layer by layer, each when it is waited for, the last only once
    `may_end` is set. As a GPU, it tells when which layers of a step are complete, and `is_broken` is noticed
    there."""

    max_steps = 2

    def __init__(self, cache):
        self._counting = CountingRunner(cache)
        self.may_end = threading.Event()
        self.is_broken = False

    def launch(self, plan):
        first = LayerGroup(0, 1, lambda: self._counting.compute(plan, 0))
        last = LayerGroup(1, 1, lambda: self._last(plan))
        return LaunchedStep(lambda: self._resolved(plan), (first, last))

    def _resolved(self, plan):
        self._counting.compute(plan, 0)
        self._last(plan)
        return self._counting.sampled(plan)

    def _last(self, plan):
        """Both who waits for the group and who resolves the step compute it: a group is complete
        when its wait returns, and both write the same numbers."""
        assert self.may_end.wait(60)
        if self.is_broken:
            raise RuntimeError("the device is on fire")
        self._counting.compute(plan, 1)


def hand_over(role, asked, grant, peer, first_block=0, source=None):
    """Have `role` compute a prompt and write it to `peer` under `grant`."""
    role.prefill(Prefill(asked, source))
    role.granted(Granted(asked.request_id, first_block, peer, grant))


class Part:
    """One engine with its memory, its transfer agent and what it sent."""

    def __init__(self, name, agent, role_class, group, runner_class):
        self.agent = agent
        self.segment = agent.allocate(NUM_BLOCKS * LAYOUT.block_bytes)
        self.cache = PagedCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"), self.segment.memory)
        self.pool = BlockPool(NUM_BLOCKS)
        self.runner = runner_class(self.cache)
        clock = SystemClock()
        scheduler = Scheduler(self.pool, 16, chunk_tokens=16, max_batch=4, max_model_len=160)
        self.loop = EngineLoop(self.runner, scheduler, self.pool, clock)
        self.sent = []
        self._news = asyncio.Event()
        shard = LocalShard(WHOLE, LAYOUT, self.segment, agent, partial(block_sums, self.cache))
        self.kv = NodeKv(LAYOUT, (shard,))
        self.own = SegmentCache(self.pool, self.cache, self.segment, agent)
        if role_class is PrefillRole:
            lent = partial(LentPrefix, self.own)
            self.role = PrefillRole(self.loop, self.kv, group, self.send, clock, lent)
        else:
            self.role = role_class(self.loop, self.kv, group, self.send, clock)

    def send(self, item):
        self.sent.append(item)
        self._news.set()

    async def said(self, kind):
        """Return the first message of `kind` that was sent, waiting for it."""
        async with asyncio.timeout(60):
            while True:
                for item in self.sent:
                    if isinstance(item, kind):
                        return item
                self._news.clear()
                await self._news.wait()

    def check_nothing_is_held(self):
        self.pool.check()
        assert self.pool.num_held == 0
        assert self.agent.num_grants == 0


@asynccontextmanager
async def parts(runner_class=CountingRunner, **role_classes):
    """Run one part for each name; all of it ends with the body."""
    clock = SystemClock()
    made = {}
    async with asyncio.TaskGroup() as group:
        for epoch, (name, role_class) in enumerate(role_classes.items()):
            agent = TransferAgent(name, epoch + 1, TransferConfig(transports=("tcp",)), clock)
            await agent.start()
            made[name] = Part(name, agent, role_class, group, runner_class)
        running = [group.create_task(part.loop.run()) for part in made.values()]
        yield made
        for part in made.values():
            part.role.tasks.end_all()
            await part.role.tasks.idle()
        for task in running:
            task.cancel()
    for part in made.values():
        await part.agent.close()


def work(num_tokens=40, max_tokens=3, deadline_s=60.0, name="r", generated=()):
    prompt = tuple(range(100, 100 + num_tokens))
    return Work(
        request_id=name,
        token_ids=(*prompt, *generated),
        num_prompt_tokens=num_tokens,
        chain_root=ROOT,
        sampling=SamplingParams(temperature=0),
        stop=StopParams(max_tokens=max_tokens),
        num_logprobs=None,
        priority=0,
        deadline_s=deadline_s,
    )
