"""A node process: one engine, one transfer agent, and the roles it was given.

    python -m node.process --config node.json

Prints one JSON line on standard output when it is ready to serve, then logs to standard
error. It ends when its standard input closes (its supervisor is gone) and drains on
SIGTERM: no new work, what runs is finished, for `DRAIN_S` at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import uvloop

from base.attach import AttachClient
from base.clock import Clock, SystemClock
from base.config import NodeProcess
from base.kv_layout import kv_id
from base.lifetime import Lifetime
from base.logs import event
from base.messages import NodeInfo
from base.metrics import NodeMetrics, StoreMetrics, export_supervised, exposition, process_registry
from base.metrics_port import serve_metrics
from base.process import run_process
from base.request import NodeId, Role
from base.spans import tracer_or_none
from base.tls import dialling_context
from decode_node.role import DecodeRole
from engine.block_sums import block_sums, sum_kind
from engine.build import Engine, build_engine
from node.kv import node_kv, node_segment, transfer_config
from node.metrics import PrefillMetrics, TransferMetrics, observe
from node.own_cache import Lender, LentPrefix
from node.store import node_store, own_cache
from node.timeline import NodeTimeline
from node.tracing import NodeTracing
from node.work import ConductorWork, SharedState
from prefill_node.role import PrefillRole
from prefill_node.sender import PrefillObserver
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""The time that requests have to end in when the node is to stop; Kubernetes' own default grace period."""


async def serve(config: NodeProcess, lifetime: Lifetime) -> None:
    """Run the node until it is to stop. The wiring diagram of the process."""
    clock = SystemClock()
    epoch = secrets.randbits(63)
    registry = process_registry()
    metrics, tracing = NodeMetrics(registry), NodeTracing(tracer_or_none(config.tracing, config.node_id))
    observers = [TransferMetrics(metrics), *tracing.transfers()]
    timeline = NodeTimeline(config.node_id, clock) if config.trace_out else None
    async with (
        TransferAgent(config.node_id, epoch, transfer_config(config), clock, observers=observers) as agent,
        _built(config, agent, clock) as (engine, segment),
    ):
        # On a GPU the first sum compiles its kernel: seconds that no request shall wait.
        await block_sums(engine.cache, [0])
        kv = node_kv(engine, segment, agent)
        info = _info(config, epoch, engine, agent)
        secured = dialling_context(config.tls, "nodes.tls")
        async with (
            node_store(config, engine, kv, segment, agent, clock, StoreMetrics(registry)) as beside,
            asyncio.TaskGroup() as tasks,
        ):
            state = SharedState(engine, info.roles, beside.own if beside is not None else None)
            prefills: list[PrefillObserver] = [PrefillMetrics(metrics)]
            if timeline is not None:
                timeline.watch(engine)
                prefills.append(timeline)
            here = own_cache(engine, segment, agent, beside)
            lent = partial(LentPrefix, here) if here is not None else None
            works = []
            background = [tasks.create_task(engine.loop.run())]
            # Seconds on a GPU, that no request shall wait.
            await engine.loop.has_begun.wait()
            for address in config.conductor_addresses:
                rng = random.Random(f"{epoch} {address}")
                client = AttachClient(info, address, rng, secured, observers=tracing.messages())
                lender = Lender(here, tasks, client.send)
                prefill = PrefillRole(engine.loop, kv, tasks, client.send, clock, lent, beside, prefills)
                decode = DecodeRole(engine.loop, kv, tasks, client.send, clock, beside)
                works.append(ConductorWork(state, client.wake, prefill, decode, lender))
                background.append(tasks.create_task(client.run(works[-1])))
            observe(metrics, engine)
            export_supervised(registry, lifetime)
            if beside is not None:
                background.append(tasks.create_task(beside.run()))
            host, port = config.metrics_host, config.metrics_port
            port = serve_metrics(partial(exposition, registry), host, port)
            if engine.cache.tensor.is_cuda:
                # A CPU has other things to do than to get ready for what may never come.
                engine.loop.grammars.warm()
            await lifetime.ready(node_id=config.node_id, metrics_host=host, metrics_port=port)
            await lifetime.stopped()
            await _drain(state, works)
            for task in background:
                task.cancel()
            for work in works:
                work.lost()
    if timeline is not None:
        timeline.write(Path(config.trace_out) / f"{config.node_id}.json")
    await tracing.close()


@asynccontextmanager
async def _built(
    config: NodeProcess, agent: TransferAgent, clock: Clock
) -> AsyncIterator[tuple[Engine, Segment]]:
    """Build the engine over memory that peers reach, and end its other ranks with the body."""
    build = partial(
        build_engine,
        config.engine,
        config.model_path,
        clock,
        rank_module="node.rank",
        for_ranks={"node": asdict(config)},
        rounded=Path(config.rounded) if config.rounded else None,
    )
    engine, segment = await asyncio.to_thread(node_segment, agent, build)
    if engine.ranks is None:
        yield engine, segment
        return
    engine.ranks.on_lost(_end_broken)
    try:
        yield engine, segment
    finally:
        await asyncio.to_thread(engine.ranks.close)


def _end_broken() -> None:
    """End this process because another rank has ended; its supervisor starts the node again.

    At once and from any thread: a part of every block is gone, and the device thread may wait
    for a rank that is not there. By the end of the stream the conductor knows that all requests
    of this node are lost, and the end of their pipes ends the other ranks.
    """
    event(log, "a rank of the engine has ended, and so does the node", level=logging.CRITICAL)
    os._exit(1)


async def _drain(state: SharedState, works: Sequence[ConductorWork]) -> None:
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
    # With mixed weights, KV of another format may stand for this node's.
    weights = "none" if config.mixed_weights else engine.quantization.format
    return NodeInfo(
        node_id=NodeId(config.node_id),
        epoch=epoch,
        roles=frozenset(Role(role) for role in config.roles),
        model_id=config.model_id,
        layout_id=kv_id(engine.layout, sum_kind(engine.cache), weights),
        max_model_len=engine.max_model_len,
        num_blocks=engine.loop.pool.num_blocks,
        block_size=engine.cache.layout.block_size,
        peer=agent.descriptor,
        host=socket.gethostname(),
        weights=engine.quantization.format,
        weights_error=engine.quantization.error,
        kv_token_bytes=engine.layout.token_bytes,
        max_batch=engine.loop.scheduler.max_batch,
        chunk_tokens=engine.loop.scheduler.chunk_tokens,
    )


def main() -> int:
    return run_process(
        "node.process",
        NodeProcess,
        lambda config: config.node_id,
        lambda config: lambda lifetime: uvloop.run(serve(config, lifetime)),
    )


if __name__ == "__main__":
    sys.exit(main())
