"""A node process: one engine, one transfer agent, and the roles it was given.

    python -m deploy.node --config node.json

Prints one JSON line on standard output when it is ready to serve, then logs to standard
error. It ends when its standard input closes (its supervisor is gone) and drains on
SIGTERM: no new work, what runs is finished, for `DRAIN_S` at most.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import secrets
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from base.attach import AttachClient
from base.block_hash import BlockHash
from base.clock import SystemClock
from base.config import NodeProcess, TransferConfig
from base.errors import ConfigError
from base.lifetime import stop_requested
from base.logs import event
from base.messages import NodeInfo
from base.metrics import NodeMetrics, StoreMetrics, process_registry, serve_metrics
from base.process import run_process, say_ready
from base.request import NodeId, Role
from base.tls import channel_credentials
from decode_node.role import DecodeRole
from deploy.node_metrics import observe
from deploy.node_store import node_store
from deploy.node_work import ConductorWork, KvNews, NodeState
from engine.block_sums import block_sums, sum_kind
from engine.build import Engine, build_engine, device_of
from kvstore.findable import Findable
from kvstore.store import Store
from prefill_node.fetcher import Fetcher
from prefill_node.lender import Lender
from prefill_node.role import PrefillRole
from transfer.agent import TransferAgent
from transfer.segment import Segment

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Of a node that was told to stop; Kubernetes' own default grace period."""


async def serve(config: NodeProcess) -> None:
    """Run the node until it is told to stop. The wiring diagram of the process."""
    if config.engine.tensor_parallel > 1:
        raise ConfigError("engine.tensor_parallel: a node hands off the KV of one rank; only 1 is possible")
    clock = SystemClock()
    epoch = secrets.randbits(63)
    registry = process_registry()
    async with TransferAgent(config.node_id, epoch, _transfer(config), clock) as agent:
        segments: list[Segment] = []

        def allocate(num_bytes: int) -> memoryview:
            segments.append(agent.allocate(num_bytes))
            return segments[-1].memory

        engine = await asyncio.to_thread(build_engine, config.engine, config.model_path, clock, allocate)
        if not segments:
            segments.append(_device_segment(agent, engine))
        # On a GPU the first sum compiles its kernel: seconds that no request shall wait.
        await block_sums(engine.cache, [0])
        info = _info(config, epoch, engine, agent)
        credentials = channel_credentials(config.tls, "nodes.tls")
        clients = [
            AttachClient(info, address, random.Random(f"{epoch} {address}"), credentials)
            for address in config.conductor_addresses
        ]
        async with (
            node_store(config, engine, segments[0], agent, clock, StoreMetrics(registry)) as stored,
            asyncio.TaskGroup() as tasks,
        ):
            own = stored.own if stored is not None else None
            beside = stored.beside if stored is not None else None
            state = _state(engine, info, own)
            works = []
            background = [tasks.create_task(engine.loop.run())]
            for client in clients:
                part = (engine.cache, segments[0], agent, tasks, client.send)
                shared = (engine.loop, *part, clock, beside)
                lender, fetcher = Lender(engine.pool, *part, own), Fetcher(engine.pool, *part)
                roles = (PrefillRole(*shared), DecodeRole(*shared))
                works.append(ConductorWork(state, client.wake, *roles, lender, fetcher))
                background.append(tasks.create_task(client.run(works[-1])))
            observe(NodeMetrics(registry), engine)
            if beside is not None:
                background.append(tasks.create_task(beside.run()))
            metrics_port = serve_metrics(registry, "127.0.0.1", config.metrics_port)
            say_ready(node_id=config.node_id, metrics_port=metrics_port)
            await stop_requested()
            await _drain(state, works)
            for task in background:
                task.cancel()
            for work in works:
                work.lost()


def _state(engine: Engine, info: NodeInfo, store: Store | None) -> NodeState:
    pool = engine.pool
    findable = Findable(pool.__contains__, lambda name: store is not None and name in store)
    news = KvNews(lambda: findable.take(*pool.take_events()))

    def snapshot() -> Iterable[BlockHash]:
        return dict.fromkeys([*pool.snapshot(), *(store.hashes if store is not None else [])])

    state = NodeState(engine, info.roles, news, snapshot)
    # Conductors count on free blocks, so they are told at once.
    pool.on_release(state.changed)
    if store is not None:
        store.on_change(findable.store_changed)
        store.on_change(lambda _: state.changed())
    return state


def _transfer(config: NodeProcess) -> TransferConfig:
    """Return how KV travels; nothing but cuda_ipc reaches what is on a GPU."""
    transports = config.transfer.transports
    if device_of(config.engine).type == "cpu" or "cuda_ipc" in transports:
        return config.transfer
    return replace(config.transfer, transports=("cuda_ipc", *transports))


def _device_segment(agent: TransferAgent, engine: Engine) -> Segment:
    """Return the segment over the paged cache of a GPU."""
    # By name, because it imports Triton, which only machines with a GPU have.
    cuda_ipc = importlib.import_module("transfer.cuda_ipc")
    segment: Segment = agent.register_device(cuda_ipc.described(engine.cache.tensor))
    return segment


async def _drain(state: NodeState, works: Sequence[ConductorWork]) -> None:
    state.is_leaving = True
    state.changed()
    event(log, "draining", requests=sum(work.num_requests for work in works))
    try:
        async with asyncio.timeout(DRAIN_S):
            for work in works:
                await work.idle()
    except TimeoutError:
        left = sum(work.num_requests for work in works)
        event(log, "drain cut short", level=logging.WARNING, requests=left)


def _info(config: NodeProcess, epoch: int, engine: Engine, agent: TransferAgent) -> NodeInfo:
    return NodeInfo(
        node_id=NodeId(config.node_id),
        epoch=epoch,
        roles=frozenset(Role(role) for role in config.roles),
        model_id=config.model_id,
        layout_id=f"{engine.cache.layout.layout_id}/{sum_kind(engine.cache)}",
        max_model_len=engine.max_model_len,
        num_blocks=engine.loop.pool.num_blocks,
        block_size=engine.cache.layout.block_size,
        peer=agent.descriptor,
        host=socket.gethostname(),
    )


def main() -> int:
    return run_process(
        "deploy.node", NodeProcess, lambda config: config.node_id, lambda config: asyncio.run(serve(config))
    )


if __name__ == "__main__":
    sys.exit(main())
