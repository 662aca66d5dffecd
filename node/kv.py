"""A node's KV, put together: the memory of each rank as a shard that its roles can ask."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from base.config import NodeProcess, TransferConfig
from engine.arrivals import prefix_parts
from engine.block_sums import CachePlace, block_sums, block_sums_in_order
from engine.build import Engine, device_of
from node.remote_shard import RemoteShard
from transfer.agent import TransferAgent
from transfer.owned.segment import Segment
from transfer.shard import LocalShard, NodeKv

Build = Callable[[Callable[[int], memoryview]], Engine]


def transfer_config(config: NodeProcess, rank: int = 0) -> TransferConfig:
    """Return how KV of a rank travels: on GPUs with `cuda_ipc` where `shm` is allowed."""
    transfer = config.transfer if rank == 0 else replace(config.transfer, port=0)
    transports = transfer.transports
    if device_of(config.engine).type == "cpu" or "cuda_ipc" in transports or "shm" not in transports:
        return transfer
    return replace(transfer, transports=("cuda_ipc", *transports))


def node_segment(agent: TransferAgent, build: Build) -> tuple[Engine, Segment]:
    """Build a rank's engine over memory that peers reach; return the two. Blocks for seconds."""
    segments: list[Segment] = []

    def allocate(num_bytes: int) -> memoryview:
        segments.append(agent.allocate(num_bytes))
        return segments[-1].memory

    engine = build(allocate)
    return engine, segments[0] if segments else _device_segment(agent, engine)


def node_kv(engine: Engine, segment: Segment, agent: TransferAgent) -> NodeKv:
    """Return the KV of all ranks."""
    own, ranks = local_shard(engine, 0, segment, agent), engine.ranks
    if ranks is None:
        return NodeKv(engine.layout, (own,))
    others = (RemoteShard(ranks, rank, part) for rank, part in enumerate(engine.parts) if rank)
    return NodeKv(engine.layout, (own, *others))


def local_shard(engine: Engine, rank: int, segment: Segment, agent: TransferAgent) -> LocalShard:
    """Return the shard of this process, which is of rank `rank`."""
    cache, part = engine.cache, engine.parts[rank]
    place = CachePlace(part, engine.layout)
    sums, in_order = partial(block_sums, cache, place=place), partial(block_sums_in_order, cache, place=place)
    layer_parts = prefix_parts(cache.layout.num_layers)
    return LocalShard(part, cache.layout, segment, agent, sums, in_order, layer_parts)


def _device_segment(agent: TransferAgent, engine: Engine) -> Segment:
    """Return the segment over the paged cache of a GPU."""
    # By name, because it imports Triton, which only machines with a GPU have.
    cuda_ipc = importlib.import_module("transfer.gpu.transport")
    segment: Segment = agent.register_device(cuda_ipc.described(engine.cache.tensor))
    return segment
