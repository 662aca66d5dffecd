"""Carries out role changes on the attached nodes. `placing/roles.py` decides them.

A node does both at any time, because prefill and decode are roles of one process. By an order it
prefers another, goes on with what it has, and reports its role to every conductor in its heartbeats.

Of several conductors only the one in control decides (`node/work.py`); the nodes obey no other.
"""

from __future__ import annotations

import asyncio
import logging

from base.clock import Clock
from base.logs import event
from base.messages import Serve
from conductor.placing.cluster_view import ClusterView
from conductor.placing.roles import STEP_S, RoleController
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership

log = logging.getLogger(__name__)


async def follow_load(
    controller: RoleController,
    view: ClusterView,
    membership: Membership,
    dispatcher: Dispatcher,
    clock: Clock,
) -> None:
    """Let nodes change roles, until cancelled. `dispatcher` knows who waits for a node."""
    while True:
        await asyncio.sleep(STEP_S)
        if not membership.in_control():
            controller.forget()
            continue
        change = controller.step(view, clock.now_s(), dispatcher.queue.waiting_s)
        if change is not None:
            session = membership.session(change.node_id)
            session.send(Serve(frozenset({change.role}), session.fence))
            event(log, "role change", node_id=change.node_id, role=change.role.value)
