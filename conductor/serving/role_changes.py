"""Carries out role changes on the attached nodes. `placing/roles.py` decides them.

A node can do both at any time, because prefill and decode are roles of one process. It is ordered
how to serve, and reports it to every conductor in its heartbeats. While it drains nothing new is placed
on it; what it has goes on, and its blocks stay where they are and are found by their hashes.

Of several conductors only the one in control decides (`node/work.py`); the nodes obey no
other. A drain ends with the control of who ordered it, so that nothing is left half done.
"""

from __future__ import annotations

import asyncio
import logging

from base.clock import Clock
from base.logs import event
from base.messages import Serve
from conductor.placing.cluster_view import ClusterView
from conductor.placing.roles import RoleAction, RoleController, RoleStep
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership

log = logging.getLogger(__name__)

# Loads are smoothed over some 15 s.
STEP_S = 2.0


async def change_roles(
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
        action = controller.step(view, clock.now_s(), dispatcher.queue.waiting_s)
        if action is not None:
            _order(action, view, membership)


def _order(action: RoleAction, view: ClusterView, membership: Membership) -> None:
    session = membership.session(action.node_id)
    is_drain = action.step is RoleStep.DRAIN
    roles = view.node(action.node_id).info.roles if is_drain else frozenset({action.role})
    session.send(Serve(roles, is_drain, session.fence))
    event(log, f"role change: {action.step.value}", node_id=action.node_id, role=action.role.value)
