"""A dispatcher and the nodes of bench/stub_node.py, joined in memory, on any loop and clock."""

import asyncio
import contextlib

from base.attach import STATE_GAP_S
from base.metrics import ConductorMetrics, process_registry
from base.request import Role
from bench.overload import stub_profile
from bench.stub_cluster import BLOCK_SIZE, stub_info
from bench.stub_node import StubNode
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.explain import Decisions
from conductor.placing.roles import RoleController
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from conductor.serving.observer import Observer
from conductor.serving.role_changes import follow_load

COST = CostModel(stub_profile())


async def attached(membership, session, said, node, clock):
    """Be the stream between a conductor and a stub node."""

    def send(item):
        loop.call_soon(deliver, item)

    def deliver(item):
        nonlocal stated_at_s
        if events := node.kv_events():
            membership.kv_events(session, events)
        session.deliver([item])
        # the state goes with what a node says, as base/attach.py has it
        if clock.now_s() >= stated_at_s + STATE_GAP_S:
            stated_at_s = clock.now_s()
            membership.heartbeat(session, node.heartbeat(), stated_at_s)

    loop, stated_at_s = asyncio.get_running_loop(), 0.0
    node.send = send
    membership.join(session)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await said.wait()
        said.clear()
        node.receive(session.take_outgoing())
        membership.heartbeat(session, node.heartbeat(), clock.now_s())


@contextlib.asynccontextmanager
async def cluster(
    clock,
    settings,
    num_prefill=2,
    num_decode=2,
    server=None,
    decision_log=None,
):
    """A dispatcher with stub nodes; gives it and its view. At the end nothing is in flight."""
    view = ClusterView(COST, BLOCK_SIZE)
    membership = Membership("m", view, clock)
    metrics = ConductorMetrics(process_registry(), "m")
    observer = Observer(metrics, view, COST, Decisions(COST, settings, decision_log), clock)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number in range(num_prefill + num_decode):
            role = Role.PREFILL if number < num_prefill else Role.DECODE
            node = StubNode(COST, 10_000, BLOCK_SIZE)
            said = asyncio.Event()
            session = NodeSession(stub_info(f"n{number}", role, "m"), lambda *_, said=said: said.set())
            tasks.append(group.create_task(attached(membership, session, said, node, clock)))
            tasks.append(group.create_task(node.run()))
        dispatcher = Dispatcher(membership, view, COST, [observer], clock, settings, server)
        if settings.roles_follow:
            following = follow_load(RoleController(COST), view, membership, dispatcher, clock)
            tasks.append(group.create_task(following))
        yield dispatcher, view
        for task in tasks:
            task.cancel()
    assert view.num_in_flight == 0
