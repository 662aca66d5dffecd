"""What the conductor says of itself and its nodes: the body of GET /status."""

from __future__ import annotations

from typing import Any

from conductor.dispatch import Dispatcher
from conductor.membership import Membership
from conductor.nodes import NodeSession


def status(dispatcher: Dispatcher, membership: Membership) -> dict[str, Any]:
    """Return a JSON object; the nodes are sorted by id."""
    sessions = sorted(membership.sessions, key=lambda session: session.info.node_id)
    return {
        "ready": dispatcher.is_ready,
        "running_requests": dispatcher.num_running,
        "nodes": [_node(session) for session in sessions],
    }


def _node(session: NodeSession) -> dict[str, Any]:
    info, heartbeat = session.info, session.last_heartbeat
    told: dict[str, Any] = {
        "id": info.node_id,
        "host": info.host,
        "roles": sorted(role.value for role in info.roles),
        "epoch": f"{info.epoch:016x}",
        "transports": [endpoint.transport for endpoint in info.peer.endpoints],
        "blocks": info.num_blocks,
        "block_size": info.block_size,
        "requests": session.num_requests,
    }
    if heartbeat is not None:
        told |= {
            "free_blocks": heartbeat.num_free_blocks,
            "held_blocks": heartbeat.num_held_blocks,
            "running": heartbeat.num_running,
            "waiting": heartbeat.num_waiting,
            "queued_tokens": heartbeat.num_queued_tokens,
            "context_tokens": heartbeat.num_context_tokens,
            "draining": heartbeat.is_draining,
        }
    return told
