"""A node as it ships, on a device that only takes its time, and with no KV to move.

Both roles, lending, the engine's loop, its scheduler and its blocks, the state that conductors hear, and the
stream to them are those of `node/process.py`. Of this file are

* the device: a step takes what a profile says to the very step that was planned, and samples one token for
  all; two steps are under way where the profile's device launches ahead;
* the ways of KV: a hand-off and a lent prefix take the profile's time for so many blocks, each as if it had
  the link to itself.

So whatever a conductor sees of such a node it would see of a real one, but for noise. `stub_node.py` knows
neither chunks nor budgets, takes less of the processor, and is for measuring conductors under load.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from base.attach import AttachClient
from base.block_hash import BlockHash
from base.clock import Clock
from base.config import EngineConfig
from base.errors import LostError
from base.grants import Grant, Operation, PeerDescriptor, RankGrant
from base.kv_layout import KvPart, all_of, head_layout
from base.link import End
from base.messages import FromNode, Lend, Lent, NodeInfo, Source
from base.request import SampledToken
from conductor.placing.cost_model import CostModel
from decode_node.role import DecodeRole
from engine.block_pool import BlockPool
from engine.build import Engine
from engine.decode_slack import predicted_step_s
from engine.loop import EngineLoop
from engine.paged_cache import PagedCache
from engine.runner import StepRunner
from engine.scheduler import Scheduler
from engine.step import LaunchedStep, StepEntry, StepPlan, StepResult, result_of
from kvstore.client import Stripes
from node.own_cache import Lender, LentPrefix
from node.work import ConductorWork, SharedState
from prefill_node.role import PrefillRole
from transfer.shard import BlockMove, NodeKv, OnArrived

TOKEN = SampledToken(5)
VOCAB_SIZE = 1 << 17
CLOCK_S = 1e-6
"""Seconds that a node's clock shows, at least: what takes less takes none."""

T = TypeVar("T")


class TimedDevice(StepRunner):
    """A device that takes a profile's time for each step. Also knows when the step waited for ends."""

    def __init__(self, cost: CostModel, clock: Clock) -> None:
        self.max_steps = 1 + cost.profile.launches_ahead
        self.due_s: float | None = None
        """When the step ends whose result was asked for last; None: the question was another."""
        self._cost = cost
        self._clock = clock
        self._free_at_s = 0.0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._free_at_s = max(self._free_at_s, self._clock.now_s()) + self._seconds(plan)
        ends_at_s = self._free_at_s
        return LaunchedStep(
            partial(self._result, plan, ends_at_s), is_over=lambda: self._clock.now_s() >= ends_at_s
        )

    def _result(self, plan: StepPlan, ends_at_s: float) -> StepResult:
        self.due_s = ends_at_s
        return result_of(plan, [TOKEN] * len(plan.sampling))

    def _seconds(self, plan: StepPlan) -> float:
        seconds = predicted_step_s(plan, self._cost.step)
        for entry in plan.entries:
            sequence = entry.sequence
            if sequence.first_token_at_s is None and entry.start == sequence.num_matched_tokens:
                seconds += self._cost.beside_chunks_s(sequence.num_tokens - entry.start, entry.start)
            elif _joins(entry):
                seconds += self._cost.profile.join_s
        return seconds


def _joins(entry: StepEntry) -> bool:
    """Return whether a sequence that was handed over decodes for the first time."""
    sequence = entry.sequence
    came_at_s, started_at_s = sequence.first_token_at_s, sequence.started_at_s
    is_first = not sequence.num_gaps and entry.start == sequence.num_tokens - 1
    return is_first and came_at_s is not None and (started_at_s is None or came_at_s <= started_at_s)


class DeviceThread(Executor):
    """Does all at once in the event loop, and says so when the device's time has passed."""

    def __init__(self, device: TimedDevice, name: str) -> None:
        self._device = device

    def submit(self, fn: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        outcome: Future[T] = Future()
        self._device.due_s = None
        result, loop = fn(*args, **more), asyncio.get_running_loop()
        due_s = self._device.due_s
        if due_s is None or due_s <= loop.time():
            outcome.set_result(result)
        else:
            loop.call_at(due_s, _end, outcome, result)
        return outcome


def _end(outcome: Future[T], result: T) -> None:
    if outcome.set_running_or_notify_cancel():
        outcome.set_result(result)


class TimedCache:
    """A node's KV as its roles and other nodes ask for it: a `KvShard` and an `OwnCache` without bytes."""

    def __init__(
        self, pool: BlockPool, peer: PeerDescriptor, whole: KvPart, block_s: Callable[[int], float]
    ) -> None:
        """Begin. `block_s`: seconds that so many blocks take on a link."""
        self.part = whole
        self._pool = pool
        self._peer = peer
        self._block_s = block_s

    # KvShard

    async def write(self, move: BlockMove) -> None:
        await self._carried(len(move.block_ids))

    async def read(self, move: BlockMove, on_arrived: OnArrived | None = None) -> None:
        raise AssertionError("without a store nothing is read")

    async def sums(self, block_ids: Sequence[int], part: KvPart) -> list[int]:
        return [0] * len(block_ids)

    def sums_in_order(self, block_ids: Sequence[int], part: KvPart) -> Awaitable[list[int]]:
        return self.sums(block_ids, part)

    async def grant(self, block_ids: Sequence[int], lease_s: float) -> RankGrant:
        return RankGrant(self._peer, self.part, _granted(Operation.WRITE, block_ids, lease_s))

    async def revoke(self, grant: Grant) -> None:
        pass

    # OwnCache

    async def lend(self, message: Lend, send: Callable[[FromNode], None]) -> None:
        block_ids = self._pool.match(message.chain)
        try:
            wanted = block_ids[message.first_block :]
            if not wanted:
                raise LostError("the blocks were evicted")
            grant = _granted(Operation.READ, wanted, message.lease_s)
            send(Lent(message.request_id, grant, (0,) * len(wanted)))
            await asyncio.sleep(message.lease_s)
        finally:
            self._pool.release(block_ids)

    async def load(
        self,
        source: Source,
        chain: Sequence[BlockHash],
        block_ids: Sequence[int],
        first: int,
        stripes: Stripes | None,
    ) -> int:
        await self._carried(len(block_ids))
        return len(block_ids)

    async def _carried(self, num_blocks: int) -> None:
        seconds = self._block_s(num_blocks)
        await asyncio.sleep(seconds if seconds > CLOCK_S else 0)


def _granted(operation: Operation, block_ids: Sequence[int], lease_s: float) -> Grant:
    return Grant(1, 1, operation, tuple(block_ids), 1, lease_s)


class TimedNode:
    """One node; what it does belongs to a task group, and ends with it."""

    def __init__(
        self,
        info: NodeInfo,
        cost: CostModel,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        config: EngineConfig | None = None,
    ) -> None:
        """Begin unattached. `config`: of its steps; its blocks are those of `info`."""
        config = config or EngineConfig()
        layout = head_layout(1, 1, 1, info.block_size, "float32")
        pool, device = BlockPool(info.num_blocks), TimedDevice(cost, clock)
        sizes = (
            config.prompt_tokens(on_gpu=cost.profile.launches_ahead),
            config.sequences(on_gpu=cost.profile.launches_ahead),
            info.max_model_len,
            VOCAB_SIZE,
        )
        scheduler = Scheduler(pool, info.block_size, *sizes)
        loop = EngineLoop(device, scheduler, pool, clock, partial(DeviceThread, device))
        self.cache = TimedCache(
            pool, info.peer, all_of(layout), lambda count: cost.transfer_s(count * info.block_size)
        )
        memory = PagedCache(layout, 1, torch.device("cpu"))
        limits = info.max_model_len, VOCAB_SIZE
        self.engine = Engine(
            loop, device, scheduler, pool, memory, layout, *limits, "timed", (self.cache.part,)
        )
        self._info = replace(info, max_batch=scheduler.max_batch, chunk_tokens=scheduler.chunk_tokens)
        self._clock, self._tasks = clock, tasks
        self._state = SharedState(self.engine, info.roles, None)
        self._kv = NodeKv(layout, (self.cache,))
        self.running = [tasks.create_task(loop.run())]
        """The tasks to cancel at the end."""

    def attach(
        self,
        address: str,
        rng: random.Random,
        secured: Callable[[], ssl.SSLContext] | None = None,
        dial_end: Callable[[End], Awaitable[None]] | None = None,
    ) -> None:
        """Serve a conductor, with the arguments of `AttachClient`."""
        client = AttachClient(self._info, address, rng, secured, dial_end)
        loop, kv, tasks, clock = self.engine.loop, self._kv, self._tasks, self._clock
        lender = Lender(self.cache, tasks, client.send)
        prefill = PrefillRole(loop, kv, tasks, client.send, clock, partial(LentPrefix, self.cache))
        decode = DecodeRole(loop, kv, tasks, client.send, clock)
        work = ConductorWork(self._state, client.wake, prefill, decode, lender)
        self.running.append(tasks.create_task(client.run(work)))
