"""A node process: one engine, one transfer agent, and the roles it was given.

    python -m deploy.node --config node.json

Prints one JSON line on standard output when it is ready to serve, then logs to standard
error. It ends when its standard input closes (its supervisor is gone) and drains on
SIGTERM: no new work, what runs is finished, for `DRAIN_S` at most.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import random
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path

from base.attach import AttachClient
from base.clock import SystemClock
from base.config import NodeProcess, TransferConfig, read_process_config
from base.errors import ConfigError
from base.lifetime import stop_requested
from base.logs import configure, event
from base.messages import Heartbeat, KvEvents, Lend, NodeInfo, Prefill, Release, Reserve, Start, ToNode
from base.metrics import NodeMetrics, StoreMetrics, process_registry, serve_metrics
from base.request import NodeId, Role
from base.tls import channel_credentials
from decode_node.role import DecodeRole
from deploy.node_metrics import observe
from deploy.node_store import node_store
from engine.block_sums import block_sums, sum_kind
from engine.build import Engine, build_engine, device_of
from kvstore.findable import Findable
from kvstore.store import Store
from prefill_node.lender import Lender
from prefill_node.role import PrefillRole
from transfer.agent import TransferAgent
from transfer.segment import Segment

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""Of a node that was told to stop; Kubernetes' own default grace period."""


class Node:
    """Routes the conductor's messages to the roles and answers for the whole node."""

    def __init__(
        self, engine: Engine, prefill: PrefillRole, decode: DecodeRole, lender: Lender, store: Store | None
    ) -> None:
        self._engine = engine
        self._store = store
        self._findable = Findable(engine.pool.__contains__, lambda name: store is not None and name in store)
        if store is not None:
            store.on_change(self._findable.store_changed)
        self._prefill = prefill
        self._decode = decode
        self._lender = lender
        self._num_heartbeats = 0
        self._next_event = 1
        self.is_draining = False

    def receive(self, items: list[ToNode]) -> None:
        for item in items:
            match item:
                case Reserve():
                    self._decode.reserve(item)
                case Prefill():
                    self._prefill.prefill(item)
                case Start():
                    self._decode.start(item)
                case Lend():
                    self._lender.lend(item)
                case Release():
                    self._lender.release(item.request_id)
                    self._prefill.release(item.request_id)
                    self._decode.release(item.request_id)

    def heartbeat(self) -> Heartbeat:
        self._num_heartbeats += 1
        pool, scheduler = self._engine.loop.pool, self._engine.loop.scheduler
        return Heartbeat(
            sequence=self._num_heartbeats,
            num_free_blocks=pool.num_available,
            num_held_blocks=pool.num_held,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_queued_tokens=scheduler.num_remaining_tokens,
            num_context_tokens=scheduler.num_context_tokens,
            is_draining=self.is_draining,
        )

    def kv_events(self) -> KvEvents | None:
        stored, removed = self._findable.take(*self._engine.loop.pool.take_events())
        if not stored and not removed:
            return None
        return self._numbered(KvEvents(self._next_event, False, tuple(stored), tuple(removed)))

    def kv_snapshot(self) -> KvEvents:
        pool = self._engine.loop.pool
        self._findable.take(*pool.take_events())  # the snapshot says it all
        in_store = self._store.hashes if self._store is not None else []
        stored = dict.fromkeys([*pool.snapshot(), *in_store])
        return self._numbered(KvEvents(self._next_event, True, tuple(stored), ()))

    def _numbered(self, events: KvEvents) -> KvEvents:
        self._next_event = events.next_number
        return events

    def lost(self) -> None:
        self._lender.release_all()
        self._prefill.release_all()
        self._decode.release_all()

    async def idle(self) -> None:
        """Return when no request is at work."""
        await self._decode.idle()
        await self._prefill.idle()

    @property
    def num_requests(self) -> int:
        return self._prefill.num_requests + self._decode.num_requests


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
        client = AttachClient(info, config.conductor_address, random.Random(epoch), credentials)
        # The conductor counts on free blocks, so it is told at once.
        engine.pool.on_release(client.wake)
        async with (
            node_store(config, engine, segments[0], agent, clock, StoreMetrics(registry)) as stored,
            asyncio.TaskGroup() as tasks,
        ):
            own = stored.own if stored is not None else None
            beside = stored.beside if stored is not None else None
            shared = (engine.loop, engine.cache, segments[0], agent, tasks, client.send, clock, beside)
            lender = Lender(engine.pool, engine.cache, segments[0], agent, tasks, client.send, own)
            node = Node(engine, PrefillRole(*shared), DecodeRole(*shared), lender, own)
            observe(NodeMetrics(registry), engine)
            background = [tasks.create_task(engine.loop.run()), tasks.create_task(client.run(node))]
            if own is not None:
                own.on_change(lambda _: client.wake())
            if beside is not None:
                background.append(tasks.create_task(beside.run()))
            _print_ready(config, serve_metrics(registry, "127.0.0.1", config.metrics_port))
            await stop_requested()
            await _drain(node)
            for task in background:
                task.cancel()
            node.lost()


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


async def _drain(node: Node) -> None:
    node.is_draining = True
    event(log, "draining", requests=node.num_requests)
    try:
        async with asyncio.timeout(DRAIN_S):
            await node.idle()
    except TimeoutError:
        event(log, "drain cut short", level=logging.WARNING, requests=node.num_requests)


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


def _print_ready(config: NodeProcess, metrics_port: int) -> None:
    ready = {"event": "ready", "node_id": config.node_id, "metrics_port": metrics_port}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.node")
    parser.add_argument("--config", type=Path, required=True, help="JSON of base.config.NodeProcess")
    arguments = parser.parse_args()
    try:
        config = read_process_config(arguments.config, NodeProcess)
        configure(config.node_id)
        asyncio.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
