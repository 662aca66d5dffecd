"""One node of a simulated cluster: the parts that `node/process.py` wires, over what is simulated.

Roles, lender, engine loop, scheduler, pools, grants, store and the client of the attach stream are
the shipped ones. The device, the disk, the bytes' way and the stream are of this folder.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial

import torch

from base.attach import AttachClient
from base.clock import Busy
from base.config import TransferConfig
from base.errors import CapacityError, LeaseExpiredError, ServeError, UnavailableError
from base.kv_layout import KvPart
from base.messages import NodeInfo
from base.request import NodeId, Role
from bench.faults.transport import Fault, FaultyTransport
from decode_node.role import DecodeRole
from engine.block_sums import block_sums
from engine.build import Engine
from engine.loop import EngineLoop
from engine.paged_cache import PagedCache
from engine.scheduler import Scheduler
from engine.token_masks import Grammars
from kvstore.access import LocalAccess
from kvstore.block_mover import SegmentMover
from kvstore.client import BlockCache
from kvstore.disk import DiskTier
from kvstore.engine_store import EngineStore
from kvstore.eviction import BY_NAME
from kvstore.hosting import keep_up
from kvstore.pool import PoolLimits
from kvstore.store import Store
from kvstore.wire import Member
from node.kv import node_kv
from node.own_cache import Lender, LentPrefix, SegmentCache
from node.work import ConductorWork, SharedState
from prefill_node.role import PrefillRole
from protos import nodes_pb2 as pb
from tests.kvstore.memory_directory import MemoryDirectory
from tests.simulation.device import LAYOUT, VOCAB, LaunchingDevice, SimDevice
from tests.simulation.disk import SimDisk
from tests.simulation.grammars import vocabulary
from tests.simulation.loop import InlineExecutor, Process
from tests.simulation.watch import WatchedAgent, WatchedHostPool, WatchedPool

MODEL_ID = "model"
WHOLE = KvPart(0, LAYOUT.num_layers, 0, LAYOUT.num_heads)
MAX_MODEL_LEN = 192
TRANSFER = TransferConfig(transports=("tcp",), timeout_s=5.0)
"""Shorter than it ships, as the whole cluster is smaller."""
CALL_TIMEOUT_S = 2.0
"""Of kvstore/access.py."""


@dataclass(frozen=True)
class NodePlan:
    """How a node is made, each time that it starts."""

    name: str
    roles: frozenset[Role]
    num_blocks: int
    chunk_tokens: int
    is_launching: bool
    store_blocks: int
    """0: no store."""
    disk_slots: int
    """0: no disk."""
    policy: str


class OffsetClock:
    """A process's own monotonic clock: its zero is anywhere."""

    def __init__(self, loop, offset_s):
        self._loop, self._offset_s = loop, offset_s

    def now_s(self):
        return self._loop.time() + self._offset_s

    def busy(self):
        return Busy(0.0, 0.0)


class SimNode:
    """A machine: its process of the moment, and the disk that outlives it."""

    def __init__(self, world, plan):
        self.world, self.plan = world, plan
        self.rng = random.Random(f"{world.seed}/{plan.name}")
        self.disk_file = SimDisk(self.rng, world.plan.disk)
        self.process = self.carriage = None
        self.agents = []

    def start(self):
        """Begin the process; it attaches by itself."""
        self.process = Process(self.plan.name, self._check)
        self.engine = self.store = self.state = None
        self.works = []
        self.process.context.run(asyncio.ensure_future, self._serve())

    @property
    def is_up(self):
        return self.process is not None and not self.process.is_dead

    def kill(self, *, is_power_cut):
        """End the process as SIGKILL does, or as a lost machine, of which nobody is told."""
        self.process.kill()
        if self.carriage is not None:
            self.carriage.killed(is_told=not is_power_cut)
        told = self.world.names - {self.plan.name}
        for other in sorted(told):
            if is_power_cut:
                self.world.network.cut(self.plan.name, other, told="nobody")
            else:
                self.world.network.cut(self.plan.name, other, told=other)
        if is_power_cut:
            self.disk_file.crash()

    async def _serve(self):
        world, plan = self.world, self.plan
        epoch = self.rng.getrandbits(63)
        self.clock = clock = OffsetClock(world.loop, self.rng.uniform(0, 1e6))
        self.agent = agent = WatchedAgent(
            plan.name,
            epoch,
            TRANSFER,
            clock,
            self._faulty,
            carriage=world.wires.carriage(self.process, epoch),
            random_bits=self.rng.getrandbits,
        )
        self.agents.append(agent)
        await agent.start()
        self.carriage = world.wires.peers[f"{plan.name}/{epoch}"]
        self.carriage.agent = agent
        segment = agent.allocate(plan.num_blocks * LAYOUT.block_bytes)
        self.engine = engine = self._engine(segment)
        agent.watch(segment, engine.pool, LAYOUT.block_bytes)
        async with asyncio.TaskGroup() as tasks:
            beside = await self._store(segment, tasks) if plan.store_blocks else None
            info = self._info(epoch)
            state = SharedState(engine, info.roles, self.store)
            kv = node_kv(engine, segment, agent)
            here = SegmentCache(engine.pool, engine.cache, segment, agent, self.store)
            tasks.create_task(engine.loop.run())
            for conductor in world.conductors:
                client = AttachClient(info, conductor.name, self.rng, dial_end=self._dialled(conductor))
                lender = Lender(here, tasks, client.send)
                lent = partial(LentPrefix, here)
                prefill = PrefillRole(engine.loop, kv, tasks, client.send, clock, lent, beside)
                decode = DecodeRole(engine.loop, kv, tasks, client.send, clock, beside)
                self.works.append(ConductorWork(state, client.wake, prefill, decode, lender))
                tasks.create_task(client.run(self.works[-1]))
            self.state = state

    def _engine(self, segment):
        plan, world = self.plan, self.world
        pool = WatchedPool(plan.num_blocks)
        cache = PagedCache(LAYOUT, plan.num_blocks, torch.device("cpu"), segment.memory)
        limit = min(MAX_MODEL_LEN, plan.num_blocks * LAYOUT.block_size)
        scheduler = Scheduler(pool, LAYOUT.block_size, plan.chunk_tokens, 4, limit, VOCAB)
        device = SimDevice(segment.memory, pool, lambda: world.chance("step"))
        runner = LaunchingDevice(device) if plan.is_launching else device
        grammars = Grammars(vocabulary, InlineExecutor)
        loop = EngineLoop(runner, scheduler, pool, self.clock, InlineExecutor, grammars)
        return Engine(loop, runner, scheduler, pool, cache, LAYOUT, limit, VOCAB, "simulated", (WHOLE,))

    async def _store(self, segment, tasks):
        world, plan, agent = self.world, self.plan, self.agent
        host_pool = WatchedHostPool(
            plan.store_blocks, BY_NAME[plan.policy], self.clock, PoolLimits(0.8, 0.6, 1.0)
        )
        disk = None
        if plan.disk_slots:
            disk = DiskTier(self.disk_file, LAYOUT.block_bytes, plan.disk_slots, self.clock)
            await disk.recover()
        # Before it allocates: the watch has to know the pool by then.
        self.store = store = Store(agent, host_pool, LAYOUT.block_bytes, disk)
        agent.watch(store.segment, host_pool, LAYOUT.block_bytes)
        address = self.carriage.address
        member = Member(
            NodeId(plan.name),
            agent.descriptor.epoch,
            address,
            plan.name,
            agent.descriptor,
            LAYOUT.block_bytes,
        )
        board = world.board if world.plan.shares_stores else world.new_board()
        directory = MemoryDirectory(board, member)
        world.stores[address] = (self, store)
        store.join(directory)
        cache = BlockCache(agent, directory, self.clock, (member, store), reach=self._reach)
        mover = SegmentMover(cache, segment, LAYOUT.block_bytes, partial(block_sums, self.engine.cache))
        beside = EngineStore(self.engine.pool, LAYOUT, mover, store, 64 * LAYOUT.block_bytes, self.clock)
        tasks.create_task(keep_up(store))
        tasks.create_task(beside.run())
        return beside

    def _info(self, epoch):
        return NodeInfo(
            node_id=NodeId(self.plan.name),
            epoch=epoch,
            roles=self.plan.roles,
            model_id=MODEL_ID,
            layout_id=LAYOUT.layout_id,
            max_model_len=self.engine.max_model_len,
            num_blocks=self.plan.num_blocks,
            block_size=LAYOUT.block_size,
            peer=self.agent.descriptor,
            host=self.plan.name,
            max_batch=self.engine.scheduler.max_batch,
            chunk_tokens=self.engine.scheduler.chunk_tokens,
        )

    def _faulty(self, transport):
        faulty = FaultyTransport(transport, self._transfer_fault)
        faulty.gate.set()
        self._faulty_transport = faulty
        return faulty

    def _transfer_fault(self):
        fault = self.world.transfer_fault()
        if fault is Fault.LATE:
            after_s = self.rng.choice((0.01, 0.2, 2.0)) * self.rng.random()
            self.world.loop.call_later(after_s, self._deliver_late, context=self.process.context)
        return fault

    def _deliver_late(self):
        self.world.started(self._faulty_transport.deliver_late())

    def _dialled(self, conductor):
        async def dial_end(end):
            conductor.attach(self.process).open(end, self._lose_events)

        return dial_end

    def _lose_events(self, message):
        """Return a message without its KV events, if they are to be lost."""
        told = pb.NodeMessage.FromString(message)
        if not told.HasField("kv_events") or not self.world.chance("kv_gap"):
            return message
        told.ClearField("kv_events")
        return told.SerializeToString()

    def _reach(self, address):
        return _FarStore(self.world, self.process, address)

    def _check(self):
        """What holds after each event of this process."""
        engine = self.engine
        if engine is None or not engine.pool.is_changed:
            return
        engine.pool.is_changed = False
        engine.pool.check()
        engine.scheduler.check()
        if self.store is not None:
            self.store.check()

    def require_idle(self):
        """Raise AssertionError, saying what, if anything is held or at work."""
        engine, name = self.engine, self.plan.name
        assert not any(work.num_requests for work in self.works), f"{name} has requests"
        assert engine.scheduler.num_waiting + engine.scheduler.num_running == 0, f"{name} has sequences"
        assert engine.pool.num_held == 0, f"{name} holds {engine.pool.num_held} blocks"
        assert engine.pool.num_promised == 0, f"{name} promises blocks"
        assert self.agent.num_grants == 0, f"{name} has {self.agent.num_grants} grants"
        if self.store is not None:
            books = self.store.pool.accounts()
            assert books.held + books.in_transfer == 0, f"{name}'s store: {books}"

    def require_known(self, view):
        """Raise AssertionError unless the conductor's index says of this node what is so."""
        here = set(self.engine.pool.snapshot())
        here |= set(self.store.hashes) if self.store is not None else set()
        known = view.node(NodeId(self.plan.name))
        assert not known.events.waits_for_snapshot, f"{self.plan.name}: a snapshot is awaited"
        assert view.index.num_blocks(known.slot) == len(here), f"{self.plan.name}: the index is not exact"
        bit = 1 << known.slot
        assert all(view.index.holders(name) & bit for name in here), f"{self.plan.name}: the index is wrong"


class _FarStore:
    """A store of another process, by calls that may be late, or lost either way."""

    def __init__(self, world, process, address):
        self._world, self._process, self._address = world, process, address

    async def match(self, chain):
        return await self._call("match", chain)

    async def reserve(self, chain, tenant):
        return await self._call("reserve", chain, tenant)

    async def commit(self, ticket, checksums):
        return await self._call("commit", ticket, checksums)

    async def abort(self, ticket):
        await self._call("abort", ticket)

    async def lease(self, chain, first):
        return await self._call("lease", chain, first)

    async def release(self, ticket):
        await self._call("release", ticket)

    async def report(self, block_hash):
        await self._call("report", block_hash)

    async def close(self):
        pass

    async def _call(self, method, *arguments):
        world = self._world
        node, store = world.stores[self._address]
        there = world.network.lane(self._process.name, node.plan.name, node.carriage.process.context)
        answered = world.loop.create_future()
        back = world.network.lane(self._process.name, node.plan.name, self._process.context)
        if not world.chance("call"):
            there.send(_begin, world, store, method, arguments, back, answered)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await answered
        except TimeoutError:
            raise UnavailableError("DEADLINE_EXCEEDED") from None


def _begin(world, store, method, arguments, back, answered):
    world.started(_answer(world, store, method, arguments, back, answered))


async def _answer(world, store, method, arguments, back, answered):
    """In the owner's process, as kvstore/service.py does it."""
    try:
        result, error = await getattr(LocalAccess(store), method)(*arguments), None
    except (CapacityError, LeaseExpiredError) as raised:
        result, error = None, raised
    except ServeError as raised:
        result, error = None, UnavailableError(str(raised))
    if not world.chance("call"):
        back.send(_end, answered, result, error)


def _end(answered, result, error):
    if answered.done():
        return
    if error is None:
        answered.set_result(result)
    else:
        answered.set_exception(error)
