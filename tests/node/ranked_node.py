"""A node of several ranks with its store, wired as in `node/process.py`: rank 0 here, others as processes."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial

import torch.distributed as dist

from base.block_hash import chain_root, hash_chain
from base.clock import SystemClock
from base.config import EngineConfig, NodeProcess, StoreConfig, TransferConfig
from base.messages import Lend, Lent, Prefill, Prefilled, Source, Tokens, Work
from base.metrics import StoreMetrics, process_registry
from base.request import SamplingParams, StopParams
from node.kv import node_kv
from node.own_cache import Lender, LentPrefix
from node.process import _built
from node.store import node_store, own_cache
from prefill_node.role import PrefillRole
from transfer.agent import TransferAgent

ROOT = chain_root("model", "layout")
BLOCK_SIZE = 16
PATIENCE_S = 60


class AskedNode:
    """Answers prompts by itself: what it computes stays with it."""

    def __init__(self, engine, agent, kv, beside, own, group, clock):
        self.engine, self.agent, self.kv = engine, agent, kv
        self.beside, self.store = beside, beside.own
        self._told, self._lent = asyncio.Queue(), asyncio.Queue()
        send = self._told.put_nowait
        self.role = PrefillRole(engine.loop, kv, group, send, clock, partial(LentPrefix, own), self.beside)
        self.lender = Lender(own, group, self._lent.put_nowait)
        self._num_asked = 0

    async def answer(self, prompt, source=None, max_tokens=6):
        """Return the greedy tokens, and how many of the prompt were there or came from `source`."""
        self._num_asked += 1
        work = Work(
            request_id=f"r{self._num_asked}",
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            chain_root=ROOT,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=max_tokens),
            num_logprobs=None,
            priority=0,
            deadline_s=PATIENCE_S,
        )
        self.role.prefill(Prefill(work, source, stays=True))
        tokens, num_cached = [], 0
        async with asyncio.timeout(PATIENCE_S):
            while len(tokens) < max_tokens:
                told = await self._told.get()
                if isinstance(told, Prefilled):
                    tokens.append(told.first_token.token_id)
                    num_cached = told.num_cached_tokens
                else:
                    assert isinstance(told, Tokens), told
                    tokens += [token.token_id for token in told.tokens]
            await self.role.tasks.idle()
        return tokens, num_cached

    async def saved(self, prompt):
        """Return when all full blocks of a prompt are in the node's store."""
        chain = hash_chain(prompt, BLOCK_SIZE, ROOT)
        async with asyncio.timeout(PATIENCE_S):
            while self.store.match(chain).num_blocks < len(chain):
                await asyncio.sleep(0)
        return chain

    async def lent(self, prompt):
        """Return the blocks of a prompt, lent."""
        self.lender.lend(Lend("lend", tuple(hash_chain(prompt, BLOCK_SIZE, ROOT)), PATIENCE_S))
        told = await asyncio.wait_for(self._lent.get(), PATIENCE_S)
        assert isinstance(told, Lent), told
        return Source(self.agent.descriptor, told.grant, told.checksums, 0)

    async def end_loans(self):
        self.lender.tasks.end_all()
        await self.lender.tasks.idle()

    async def forget(self):
        """Evict all that the engine's cache has, once steps that end and saves hold nothing of it."""
        pool = self.engine.pool
        async with asyncio.timeout(PATIENCE_S):
            while pool.num_held:
                await asyncio.sleep(0)
        pool.release(pool.allocate(pool.num_blocks))

    def check_nothing_is_held(self):
        self.engine.pool.check()
        assert self.engine.pool.num_held == 0
        assert self.agent.num_grants == 0
        self.store.check()
        books = self.store.pool.accounts()
        assert (books.in_transfer, books.held) == (0, 0)


@asynccontextmanager
async def asked_node(folder, tensor, stages, name="node", kv_dtype="auto", **store):
    """Run a node in the body; `store`: of its block cache, what is different."""
    clock = SystemClock()
    engine = EngineConfig(
        device="cpu", block_size=BLOCK_SIZE, kv_cache_gib=0.001, chunk_tokens=48, max_batch=4, threads=1,
        tensor_parallel=tensor, pipeline_parallel=stages, kv_dtype=kv_dtype,
    )  # fmt: skip
    config = NodeProcess(
        node_id=name,
        roles=("prefill",),
        model_path=str(folder),
        model_id="model",
        conductor_addresses=(),
        engine=engine,
        transfer=TransferConfig(),
        store=StoreConfig(**{"dram_gib": 0.01, "save_mib_per_s": 1e6} | store),
    )
    try:
        async with (
            TransferAgent(name, random.getrandbits(60), config.transfer, clock) as agent,
            _built(config, agent, clock) as (built, segment),
        ):
            kv = node_kv(built, segment, agent)
            metrics = StoreMetrics(process_registry())
            async with (
                node_store(config, built, kv, segment, agent, clock, metrics) as beside,
                asyncio.TaskGroup() as group,
            ):
                # What takes longer than computing is not loaded, and on a busy machine anything may: so
                # nobody learns here what computing takes.
                beside.computed = lambda num_tokens, seconds: None
                running = [group.create_task(built.loop.run()), group.create_task(beside.run())]
                own = own_cache(built, segment, agent, beside)
                node = AskedNode(built, agent, kv, beside, own, group, clock)
                yield node
                node.role.tasks.end_all()
                await node.end_loans()
                for task in running:
                    task.cancel()
    finally:
        if tensor * stages > 1 and dist.is_initialized():
            dist.destroy_process_group()
