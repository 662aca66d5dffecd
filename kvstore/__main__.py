"""A storage process: host memory and disk for the cluster's block cache, and no engine.

    python -m kvstore --config store.json      JSON of kvstore.settings.StoreProcess

One line of JSON on standard output says that it is ready, and where it listens. It ends
when standard input closes, or on SIGTERM, after calls under way have been answered.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
from functools import partial

from base.attach import AttachClient
from base.clock import SystemClock
from base.lifetime import Lifetime
from base.logs import event
from base.metrics import StoreMetrics, export_supervised, exposition, process_registry
from base.metrics_port import serve_metrics
from base.process import run_process
from base.tls import dialling_context
from kvstore.attached import AttachedStore, storage_info
from kvstore.hosting import HostedStore, hosted_store
from kvstore.settings import StoreProcess
from transfer.agent import TransferAgent

log = logging.getLogger(__name__)


async def serve(config: StoreProcess, lifetime: Lifetime) -> None:
    """Run until the lifetime ends."""
    clock = SystemClock()
    registry = process_registry()
    async with (
        TransferAgent(config.node_id, secrets.randbits(63), config.transfer, clock) as agent,
        hosted_store(config, agent, clock, StoreMetrics(registry)) as hosted,
        asyncio.TaskGroup() as tasks,
    ):
        attached = [
            tasks.create_task(_attached(address, config, hosted, tasks))
            for address in config.conductor_addresses
        ]
        export_supervised(registry, lifetime)
        await lifetime.ready(
            node_id=config.node_id,
            address=hosted.member.address,
            metrics_port=serve_metrics(partial(exposition, registry), "127.0.0.1", config.metrics_port),
        )
        event(log, "stopping", reason=await lifetime.stopped())
        for attachment in attached:
            attachment.cancel()


async def _attached(
    address: str, config: StoreProcess, hosted: HostedStore, group: asyncio.TaskGroup
) -> None:
    """Be a node of one conductor's."""
    num_blocks = config.num_blocks + config.num_disk_blocks
    info = storage_info(config.node_id, hosted.member.peer, num_blocks)
    secured = dialling_context(config.tls, "tls")
    client = AttachClient(info, address, random.Random(f"{info.epoch} {address}"), secured)
    work = AttachedStore(hosted.store, group, client.send)
    # Who asks next may be placed by what has just come.
    hosted.store.on_change(lambda _: client.wake())
    await client.run(work)


def main() -> int:
    return run_process(
        "kvstore",
        StoreProcess,
        lambda config: config.node_id,
        lambda config: lambda lifetime: asyncio.run(serve(config, lifetime)),
    )


if __name__ == "__main__":
    sys.exit(main())
