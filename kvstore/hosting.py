"""A store within a process: everything it is made of, put together and taken apart.

    async with hosted_store(settings, agent, clock) as hosted:
        await hosted.cache.load(chain, segment, offsets, sums=sums)

A storage process is this and nothing else; a node of the cluster has it beside its engine,
with the same transfer agent, so that its cache reaches its own store without a copy more
than the one between two memories.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from base.clock import Clock
from base.config import TlsConfig
from base.logs import event
from base.metrics import StoreMetrics
from base.request import NodeId
from base.rpc import Port, admit_all, start_server
from base.tls import Certificates, dialling_credentials
from kvstore.access import RemoteAccess
from kvstore.client import BlockCache
from kvstore.directory import RedisDirectory
from kvstore.disk import DiskTier, opened
from kvstore.eviction import BY_NAME
from kvstore.peers import PeerDirectory
from kvstore.pool import HostPool, PoolLimits
from kvstore.service import admit_nodes, store_service
from kvstore.settings import StoreProcess
from kvstore.store import LEASE_S, Store
from kvstore.wire import Member
from transfer.agent import TransferAgent

log = logging.getLogger(__name__)

TICK_S = 1.0
DRAIN_S = 10.0
"""Time for calls under way when the store is to end."""
PERSIST_S = 5.0
"""Time to write memory to disk then, and for the writes under way after it; the rest is computed again."""
MAX_MESSAGE_BYTES = 16 << 20
"""A chain of a million tokens is 256 KiB."""


@dataclass(frozen=True, slots=True)
class HostedStore:
    """A store that is up."""

    member: Member
    store: Store
    cache: BlockCache
    """The way into the whole cluster's cache; saves here, looks here first."""


@asynccontextmanager
async def hosted_store(
    settings: StoreProcess, agent: TransferAgent, clock: Clock, metrics: StoreMetrics | None = None
) -> AsyncIterator[HostedStore]:
    """A store that serves, is listed and is kept up, for the length of the body.

    Raises:
        ConfigError: the port or the disk cannot be had.
        OSError: there is no memory for the pool.
    """
    limits = PoolLimits(settings.high_watermark, settings.low_watermark, settings.tenant_quota)
    # Who was cut off by a restart ends its puts and leases with the process before, not with this one.
    pool = HostPool(settings.num_blocks, BY_NAME[settings.policy], clock, limits, agent.descriptor.epoch)
    disk = await _opened_disk(settings, clock)
    store = Store(agent, pool, settings.block_bytes, disk, metrics)
    members: list[Member] = []
    server, address = await _listening(settings, store, clock, lambda: members[0])
    member = Member(
        node_id=NodeId(settings.node_id),
        epoch=agent.descriptor.epoch,
        address=address,
        host=socket.gethostname(),
        peer=agent.descriptor,
        block_bytes=settings.block_bytes,
    )
    members.append(member)
    reach = partial(RemoteAccess, credentials=dialling_credentials(settings.tls, "tls"))
    directory = _directory(settings, clock, (member, store), reach)
    if isinstance(directory, RedisDirectory):
        store.join(directory)
    cache = BlockCache(agent, directory, clock, (member, store), reach, settings.block_bytes)
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(keep_up(store)), tasks.create_task(_running(directory))]
            yield HostedStore(member, store, cache)
            if server is not None:
                await server.stop(DRAIN_S)
            with _bounded(2 * PERSIST_S, disk), suppress(TimeoutError):
                async with asyncio.timeout(PERSIST_S):
                    await store.persist()
            for task in background:
                task.cancel()
    finally:
        with _bounded(2 * LEASE_S, disk):  # grants may run out first
            if server is not None:
                await server.stop(0)
            await store.close()
            await cache.close()
            await directory.close()
            if disk is not None:
                await disk.close()


@asynccontextmanager
async def block_cache(
    redis_url: str,
    peers: Sequence[str],
    agent: TransferAgent,
    clock: Clock,
    tls: TlsConfig | None = None,
    block_bytes: int = 0,
) -> AsyncIterator[BlockCache]:
    """A way into the cluster's cache for a process that has no store itself.

    Stores are found in Redis, or where no url is given by asking `peers`, addresses of all of them. With
    `tls`, a node's certificate is shown to them and one asked for. `block_bytes` is as for `BlockCache`.
    """
    reach = partial(RemoteAccess, credentials=dialling_credentials(tls or TlsConfig(), "tls"))
    directory: RedisDirectory | PeerDirectory
    if redis_url:
        directory = RedisDirectory(redis_url, clock, random.Random(agent.descriptor.epoch))
    else:
        directory = PeerDirectory(peers, clock, reach=reach)
    cache = BlockCache(agent, directory, clock, reach=reach, block_bytes=block_bytes)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_running(directory))
            yield cache
            running.cancel()
    finally:
        await cache.close()
        await directory.close()


@contextmanager
def _bounded(seconds: float, disk: DiskTier | None) -> Iterator[None]:
    """End the process where the body, which closes a store, takes longer: its disk hangs.

    Threads that wait for a disk have the pool's memory, and nothing but the process's end ends them.
    """
    timer = asyncio.get_running_loop().call_later(seconds, _end_hung) if disk is not None else None
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def _end_hung() -> None:
    event(log, "the disk hangs, and the process ends without it", level=logging.CRITICAL)
    os._exit(1)


async def _running(directory: RedisDirectory | PeerDirectory) -> None:
    if isinstance(directory, RedisDirectory):
        await directory.run()


async def _opened_disk(settings: StoreProcess, clock: Clock) -> DiskTier | None:
    if not settings.disk.folder:
        return None
    disk = opened(Path(settings.disk.folder), settings.block_bytes, settings.num_disk_blocks, clock)
    event(log, "disk opened", blocks=await disk.recover(), slots=settings.num_disk_blocks)
    return disk


def _directory(
    settings: StoreProcess, clock: Clock, own: tuple[Member, Store], reach: Callable[[str], RemoteAccess]
) -> RedisDirectory | PeerDirectory:
    if settings.redis_url:
        return RedisDirectory(settings.redis_url, clock, random.Random(own[0].epoch), own[0])
    return PeerDirectory(settings.peers, clock, own, reach)


async def _listening(
    settings: StoreProcess, store: Store, clock: Clock, describe: Callable[[], Member]
) -> tuple[grpc.aio.Server | None, str]:
    """Serve `store` to other processes where any may know of it; return the server and its address."""
    if not settings.is_listening:
        return None, ""
    tls = settings.tls
    credentials = Certificates(tls, "tls").for_grpc() if tls.is_set else None
    server, port, _ = await start_server(
        [store_service(store, clock, describe)],
        lambda: True,
        Port(f"{settings.host}:{settings.port}", credentials),
        MAX_MESSAGE_BYTES,
        admit_nodes if tls.is_set else admit_all,
    )
    return server, f"{settings.host}:{port}"


async def keep_up(store: Store) -> None:
    """End what ran out and make room, once a second and when memory is crowded, until cancelled."""
    while True:
        await store.tick()
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await store.crowded.wait()
