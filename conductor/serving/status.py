"""The status of the conductor and its nodes: the body of GET /status, and gauges of the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from base.clock import Clock
from base.lifetime import Lifetime
from base.messages import ExpertLoad, Heartbeat
from base.metrics import ConductorMetrics
from conductor.placing.cluster_view import ClusterView
from conductor.serving.dispatch import Dispatcher
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession


def status(
    dispatcher: Dispatcher, membership: Membership, view: ClusterView, lifetime: Lifetime
) -> dict[str, Any]:
    """Return a JSON object; the nodes are sorted by id."""
    sessions = sorted(membership.sessions, key=lambda session: session.info.node_id)
    return {
        "ready": dispatcher.is_ready,
        "in_control": membership.in_control(),
        "supervised": lifetime.is_supervised,
        "running_requests": dispatcher.num_running,
        "waiting_requests": len(dispatcher.queue),
        "nodes": [_node(session, view) for session in sessions],
    }


def held_share(beats: Iterable[Heartbeat]) -> float:
    """Return the share of all KV blocks of some nodes that requests hold."""
    blocks = [(beat.num_held_blocks, beat.num_free_blocks) for beat in beats]
    held = sum(held for held, _ in blocks)
    return held / max(1, held + sum(free for _, free in blocks))


def export_gauges(
    metrics: ConductorMetrics, dispatcher: Dispatcher, membership: Membership, clock: Clock
) -> None:
    """Let the gauges be read when they are scraped: the queue's length, and the last heartbeats."""

    def view_age_s() -> float:
        heard = (session.last_heartbeat_at_s for session in membership.sessions if session.last_heartbeat)
        return max((clock.now_s() - at_s for at_s in heard), default=0.0)

    metrics.unplaced.set_function(lambda: len(dispatcher.queue))
    metrics.waiting.set_function(lambda: sum(beat.num_waiting for beat in membership.heartbeats))
    metrics.kv_usage.set_function(lambda: held_share(membership.heartbeats))
    metrics.view_age.set_function(view_age_s)


def _node(session: NodeSession, view: ClusterView) -> dict[str, Any]:
    info, heartbeat = session.info, session.last_heartbeat
    row: dict[str, Any] = {
        "id": info.node_id,
        "host": info.host,
        "roles": sorted(role.value for role in view.node(info.node_id).info.roles),
        "epoch": f"{info.epoch:016x}",
        "transports": [endpoint.transport for endpoint in info.peer.endpoints],
        "blocks": info.num_blocks,
        "block_size": info.block_size,
        "requests": session.num_requests,
        "weights": info.weights,
        "weights_error": round(info.weights_error, 4),
        "kv_token_bytes": info.kv_token_bytes,
    }
    if heartbeat is not None:
        row |= {
            "free_blocks": heartbeat.num_free_blocks,
            "held_blocks": heartbeat.num_held_blocks,
            "running": heartbeat.num_running,
            "waiting": heartbeat.num_waiting,
            "queued_tokens": heartbeat.num_queued_tokens,
            "context_tokens": heartbeat.num_context_tokens,
            "draining": heartbeat.is_draining,
        }
    if heartbeat is not None and heartbeat.experts is not None:
        row["experts"] = _experts(heartbeat.experts)
    return row


def _experts(load: ExpertLoad) -> dict[str, Any]:
    return {
        "choices": load.num_choices,
        "busiest": round(load.busiest, 3),
        "busiest_of_a_layer": round(load.busiest_of_a_layer, 3),
        "busiest_rank": round(load.busiest_rank, 3),
        "ranks": [round(share, 3) for share in load.ranks],
    }
