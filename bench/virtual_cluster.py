"""A conductor's dispatcher and nodes that take their time, joined in memory, on any loop and clock.

    async with virtual_cluster(clock, settings, node_infos(2, 2)) as (dispatcher, view): ...

Between them is the stream that nodes open to a conductor, as it is but for the socket. With `virtual_loop.py`
hours of a live cluster pass in seconds, and no machine's noise is in it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from base.clock import Clock
from base.config import EngineConfig, ServerConfig
from base.errors import ServeError
from base.link import End
from base.messages import NodeInfo, Registered
from base.metrics import ConductorMetrics, process_registry
from base.request import Role
from bench.overload import stub_profile
from bench.stub_cluster import BLOCK_SIZE, NUM_BLOCKS, stub_info
from bench.timed_node import TimedNode
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.explain import Decisions
from conductor.placing.roles import RoleController
from conductor.placing.scheduler_settings import SchedulerSettings
from conductor.serving.attach import AttachService
from conductor.serving.decision_log import DecisionLog
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership
from conductor.serving.observer import Observer
from conductor.serving.role_changes import follow_load

MODEL_ID = "m"
COST = CostModel(stub_profile())


def node_infos(
    num_prefill: int = 2, num_decode: int = 2, num_both: int = 0, num_blocks: int = NUM_BLOCKS
) -> list[NodeInfo]:
    """Return what nodes say of themselves, those that prefill first."""
    prefill, decode = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
    roles = [prefill] * num_prefill + [decode] * num_decode + [prefill | decode] * num_both
    sizes = num_blocks, num_blocks * BLOCK_SIZE
    return [stub_info(f"n{number}", each, MODEL_ID, *sizes) for number, each in enumerate(roles)]


class _Side:
    """One end's link in memory: a `MessageStream`, of which each message takes a turn of the event loop."""

    is_choked = False
    peer_uris = ()

    def __init__(self, end: End) -> None:
        self.end = end
        self.other: _Side = self
        self.is_over = False

    def send(self, message: bytes) -> None:
        if not self.is_over:
            asyncio.get_running_loop().call_soon(self.other.arrive, message)

    def close(self, error: Exception | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            self.end.closed(error)
            asyncio.get_running_loop().call_soon(self.other.close)

    def arrive(self, message: bytes) -> None:
        if not self.is_over:
            try:
                self.end.received(message)
            except ServeError as error:
                self.close(error)


async def _joined(service: AttachService, end: End) -> None:
    """Open a node's stream to a conductor."""
    ours, theirs = _Side(service.stream()), _Side(end)
    ours.other, theirs.other = theirs, ours
    ours.end.opened(ours)
    end.opened(theirs)


@asynccontextmanager
async def virtual_cluster(
    clock: Clock,
    settings: SchedulerSettings,
    nodes: Sequence[NodeInfo],
    cost: CostModel = COST,
    server: ServerConfig | None = None,
    decision_log: DecisionLog | None = None,
    engine: EngineConfig | None = None,
) -> AsyncIterator[tuple[Dispatcher, ClusterView]]:
    """Have a dispatcher with nodes attached, and its view, in the body. At its end nothing is in flight.

    Args:
        engine: Of every node's steps.
    """
    logs = (decision_log,)
    async with virtual_conductors(clock, settings, nodes, logs, cost, server, engine) as (conductor,):
        yield conductor


@asynccontextmanager
async def virtual_conductors(
    clock: Clock,
    settings: SchedulerSettings,
    nodes: Sequence[NodeInfo],
    decision_logs: Sequence[DecisionLog | None],
    cost: CostModel = COST,
    server: ServerConfig | None = None,
    engine: EngineConfig | None = None,
) -> AsyncIterator[list[tuple[Dispatcher, ClusterView]]]:
    """Have as many dispatchers as decision logs, and their views, in the body; all share the nodes."""
    server = server or ServerConfig()
    async with asyncio.TaskGroup() as tasks:
        running, conductors, services = [], [], []
        for log in decision_logs:
            view = ClusterView(cost, nodes[0].block_size)
            membership = Membership(MODEL_ID, view, clock)
            metrics = ConductorMetrics(process_registry(), MODEL_ID)
            observer = Observer(metrics, view, cost, Decisions(cost, settings, log), clock)
            dispatcher = Dispatcher(membership, view, cost, [observer], clock, settings, server)
            registered = Registered(server.lease_s, server.heartbeat_s, 1, cost.step)
            services.append(AttachService(membership, registered, clock))
            conductors.append((dispatcher, view))
            if settings.roles_follow:
                following = follow_load(RoleController(cost), view, membership, dispatcher, clock)
                running.append(tasks.create_task(following))
        for number, info in enumerate(nodes):
            node = TimedNode(info, cost, clock, tasks, engine)
            for service in services:
                node.attach("here", random.Random(number), dial_end=partial(_joined, service))
            running += node.running
        while any(len(view.node_ids()) < len(nodes) for _, view in conductors):  # noqa: ASYNC110
            await asyncio.sleep(0)  # turns of the loop, and no time
        yield conductors
        num_in_flight = sum(view.num_in_flight for _, view in conductors)
        for task in running:
            task.cancel()
    assert not num_in_flight, f"{num_in_flight} requests are still placed"
