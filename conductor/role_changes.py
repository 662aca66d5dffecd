"""Carries out role changes on the attached nodes. `roles.py` decides them.

A node can do both at any time, because prefill and decode are roles of one process: a change
is a change of the view. While it drains nothing new is placed on it; what it has goes on, and
its blocks stay where they are and are found by their hashes. A node that attaches again has
the roles it was started with.
"""

from __future__ import annotations

import asyncio
import logging

from base.clock import Clock
from base.logs import event
from conductor.cluster_view import ClusterView
from conductor.dispatch import Dispatcher
from conductor.roles import RoleController, RoleStep

log = logging.getLogger(__name__)

# Loads are smoothed over some 15 s.
STEP_S = 2.0


async def change_roles(
    controller: RoleController, view: ClusterView, dispatcher: Dispatcher, clock: Clock
) -> None:
    """Let nodes change roles, until cancelled."""
    while True:
        await asyncio.sleep(STEP_S)
        action = controller.step(view, clock.now_s(), dispatcher.waiting_s)
        if action is None:
            continue
        now_s = clock.now_s()
        if action.step is RoleStep.DRAIN:
            view.set_draining(action.node_id, now_s)
        else:
            view.set_roles(action.node_id, frozenset({action.role}), now_s)
            view.set_draining(action.node_id, now_s, False)
        event(log, f"role change: {action.step.value}", node_id=action.node_id, role=action.role.value)
        dispatcher.placement_changed()
