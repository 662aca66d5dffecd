"""A storage process: host memory and disk for the cluster's block cache, and no engine.

    python -m kvstore --config store.json      JSON of kvstore.settings.StoreProcess

One line of JSON on standard output says that it is ready, and where it listens. It ends
when standard input closes, or on SIGTERM, after what was lent out has been given back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import secrets
import socket
import sys
from pathlib import Path

from base.clock import SystemClock
from base.config import read_process_config
from base.errors import ConfigError
from base.lifetime import stop_requested
from base.logs import configure, event
from base.request import NodeId
from base.rpc import start_server
from kvstore.client import BlockCache
from kvstore.directory import Directory, MemoryBoard, MemoryDirectory, RedisDirectory
from kvstore.disk import DiskTier, opened
from kvstore.eviction import BY_NAME
from kvstore.member import Member
from kvstore.pool import HostPool, PoolLimits
from kvstore.record import HEADER_BYTES
from kvstore.replication import Replicator
from kvstore.service import store_service
from kvstore.settings import StoreProcess
from kvstore.store import Store
from transfer.agent import TransferAgent

log = logging.getLogger(__name__)

TICK_S = 1.0
ROUND_S = 5.0
"""Between two looks at what is hot."""
DRAIN_S = 10.0
"""For calls under way when the process is told to end."""
MAX_MESSAGE_BYTES = 16 << 20
"""A chain of a million tokens is 256 KiB."""


async def serve(config: StoreProcess) -> None:
    """Run until told to stop. The wiring diagram of the process."""
    clock = SystemClock()
    epoch = secrets.randbits(64)
    async with TransferAgent(config.node_id, epoch, config.transfer, clock) as agent:
        limits = PoolLimits(config.high_watermark, config.low_watermark, config.tenant_quota)
        pool = HostPool(config.num_blocks, BY_NAME[config.policy], clock, limits)
        disk = await _disk(config)
        store = Store(agent, pool, config.block_bytes, disk)
        members: list[Member] = []
        service = store_service(store, lambda: members[0])
        server, port, health = await start_server(
            [service], lambda: bool(members), f"{config.host}:{config.port}", MAX_MESSAGE_BYTES
        )
        address = f"{config.host}:{port}"
        members.append(
            Member(
                NodeId(config.node_id),
                epoch,
                address,
                socket.gethostname(),
                agent.descriptor,
                config.block_bytes,
            )
        )
        directory = _directory(config, members[0], random.Random(epoch))
        store.join(directory)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(stop_requested())
            background = [tasks.create_task(_tick(store))]
            if isinstance(directory, RedisDirectory):
                background.append(tasks.create_task(directory.run()))
                cache = BlockCache(agent, directory, clock, (members[0], store))
                replicator = Replicator(store, cache, members[0])
                background.append(tasks.create_task(_replicate(replicator, config.replicate_mib_per_s)))
            await asyncio.sleep(0)  # so that it listens for signals before it says that it is ready
            _print_ready(config, address)
            event(log, "stopping", reason=await stopping)
            members.clear()
            health.refresh()
            await server.stop(DRAIN_S)
            await store.close()
            for task in background:
                task.cancel()
        if isinstance(directory, RedisDirectory):
            await directory.close()
        if disk is not None:
            await disk.close()


async def _disk(config: StoreProcess) -> DiskTier | None:
    if not config.disk.folder:
        return None
    num_slots = int(config.disk.gib * (1 << 30) / (config.block_bytes + HEADER_BYTES))
    disk = opened(Path(config.disk.folder), config.block_bytes, num_slots)
    event(log, "disk opened", blocks=await disk.recover(), slots=num_slots)
    return disk


def _directory(config: StoreProcess, member: Member, rng: random.Random) -> Directory:
    if config.redis_url:
        return RedisDirectory(config.redis_url, SystemClock(), rng, member)
    return MemoryDirectory(MemoryBoard(), member)


async def _tick(store: Store) -> None:
    while True:
        await store.tick()
        await asyncio.sleep(TICK_S)


async def _replicate(replicator: Replicator, mib_per_s: float) -> None:
    while mib_per_s:
        await replicator.round(int(mib_per_s * ROUND_S * (1 << 20)))
        await asyncio.sleep(ROUND_S)


def _print_ready(config: StoreProcess, address: str) -> None:
    sys.stdout.write(json.dumps({"event": "ready", "node_id": config.node_id, "address": address}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Read the configuration and serve; 2: the configuration is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kvstore", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON of kvstore.settings.StoreProcess")
    arguments = parser.parse_args()
    try:
        config = read_process_config(arguments.config, StoreProcess)
        configure(config.node_id)
        asyncio.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
