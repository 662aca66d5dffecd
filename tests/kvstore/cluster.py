"""Stores of one process, each with its agent and its server, sharing a directory."""

import random
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from base.block_hash import BlockHash
from base.checksum import checksum
from base.config import TransferConfig
from base.request import NodeId
from base.rpc import Port, start_server
from kvstore.client import BlockCache
from kvstore.context import private_segment
from kvstore.disk import opened
from kvstore.eviction import BY_NAME
from kvstore.pool import HostPool, PoolLimits
from kvstore.service import store_service
from kvstore.store import Store
from kvstore.wire import Member
from tests.kvstore.memory_directory import MemoryBoard, MemoryDirectory
from tests.manual_clock import ManualClock
from transfer.agent import TransferAgent

BLOCK_BYTES = 64 << 10


def chain_of(path):
    return [BlockHash(path[: length + 1].encode().rjust(16, b".")) for length in range(len(path))]


def bytes_of(block_hash):
    return random.Random(bytes(block_hash)).randbytes(BLOCK_BYTES)


def unwrapped(transport):
    return transport


@contextmanager
def patience():
    """Let this process wait for an answer of a store, and a tick for a disk, as long as a busy machine takes.

    A collection of all objects alone, in a process that ran many tests, takes longer than a call may.
    """
    with ExitStack() as stack:
        for limit in ("access.CALL_TIMEOUT_S", "access.LEASE_TIMEOUT_S", "store.UPKEEP_S"):
            stack.enter_context(patch(f"kvstore.{limit}", None))
        yield


@dataclass
class Node:
    """A member: its store, its server, and a cache client that saves to it."""

    member: Member
    store: Store
    cache: BlockCache
    agent: TransferAgent
    life: AsyncExitStack
    clock: ManualClock
    server: object
    is_dead: bool = False

    async def leave(self):
        """End as a process does that is told to; who is dead ends nothing."""
        if not self.is_dead:
            await self.store.close()

    async def die(self):
        """Go without a word: peers find a closed port."""
        self.is_dead = True
        await self.server.stop(0)
        await self.life.aclose()


class Cluster:
    """Makes members and outside clients; closes them all. Each has a clock, which a test moves."""

    def __init__(self):
        self.board = MemoryBoard()
        self.stack = AsyncExitStack()
        self.last_epoch = 0
        self.lives = {}

    async def agent(self, name, clock, transports=("tcp",), wrap=unwrapped):
        self.last_epoch += 1
        config = TransferConfig(transports=transports, timeout_s=60.0)
        agent = TransferAgent(name, self.last_epoch, config, clock, wrap)
        life = AsyncExitStack()
        self.lives[agent] = life
        self.stack.push_async_callback(life.aclose)
        return await life.enter_async_context(agent)

    async def node(
        self, name, num_blocks=16, folder=None, transports=("tcp",), num_slots=64, wrap=unwrapped, **limits
    ):
        clock = ManualClock()
        agent = await self.agent(name, clock, transports, wrap)
        disk = None
        if folder is not None:
            disk = opened(folder, BLOCK_BYTES, num_slots, clock)
            await disk.recover()
            self.stack.push_async_callback(disk.close)
        store = Store(
            agent, HostPool(num_blocks, BY_NAME["lru"], clock, PoolLimits(**limits)), BLOCK_BYTES, disk
        )
        members = []
        service = store_service(store, clock, lambda: members[0])
        server, port, _ = await start_server([service], lambda: True, Port("127.0.0.1:0"), 16 << 20)
        self.stack.push_async_callback(server.stop, 0)
        peer = agent.descriptor
        member = Member(NodeId(name), peer.epoch, f"127.0.0.1:{port}", name, peer, BLOCK_BYTES)
        members.append(member)
        directory = MemoryDirectory(self.board, member)
        store.join(directory)
        cache = BlockCache(agent, directory, clock, (member, store))
        self.stack.push_async_callback(cache.close)
        node = Node(member, store, cache, agent, self.lives[agent], clock, server)
        self.stack.push_async_callback(node.leave)
        return node

    async def client(self, transports=("tcp",), wrap=unwrapped, **options):
        """A program outside: an agent and a cache client without a store; `options`: of the client."""
        clock = ManualClock()
        agent = await self.agent("outside", clock, transports, wrap)
        cache = BlockCache(agent, MemoryDirectory(self.board), clock, **options)
        self.stack.push_async_callback(cache.close)
        return cache, clock


@asynccontextmanager
async def running_cluster():
    cluster = Cluster()
    with patience():
        async with cluster.stack:
            yield cluster


async def save(cache, path, first=0, **options):
    """Save blocks `first` and on of the chain of `path`, with the bytes that follow from it."""
    chain = chain_of(path)
    source = private_segment((len(chain) - first) * BLOCK_BYTES)
    for index, block_hash in enumerate(chain[first:]):
        source.memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] = bytes_of(block_hash)
    sums = [checksum(bytes_of(block_hash)) for block_hash in chain[first:]]
    offsets = [index * BLOCK_BYTES for index in range(len(sums))]
    return await cache.save(chain, source, offsets, sums, first, **options)


async def load(cache, path, first=0):
    """Load blocks `first` and on; return how many came, having looked at every byte."""
    chain = chain_of(path)
    into = private_segment((len(chain) - first) * BLOCK_BYTES)
    offsets = [index * BLOCK_BYTES for index in range(len(chain) - first)]

    async def sums(landed):
        return [checksum(into.memory[offset : offset + BLOCK_BYTES]) for offset in landed]

    count = await cache.load(chain, into, offsets, first, sums=sums)
    for index in range(count):
        came = bytes(into.memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
        assert came == bytes_of(chain[first + index]), "wrong bytes"
    return count
