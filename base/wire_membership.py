"""Registration, leases, heartbeats and KV events, to protobuf messages and back."""

from __future__ import annotations

from base.errors import ProtocolError
from base.messages import Heartbeat, KvEvents, Lease, NodeInfo
from base.request import NodeId, Role
from base.wire import enum_from, hashes_from, peer_from, peer_to
from protos import nodes_pb2 as pb


def register(node: NodeInfo) -> pb.NodeMessage:
    """Return the first message of a stream."""
    return pb.NodeMessage(
        register=pb.Register(
            node_id=node.node_id,
            epoch=node.epoch,
            roles=sorted(role.value for role in node.roles),
            model_id=node.model_id,
            layout_id=node.layout_id,
            max_model_len=node.max_model_len,
            num_blocks=node.num_blocks,
            block_size=node.block_size,
            peer=peer_to(node.peer),
            protocol_version=node.protocol_version,
            host=node.host,
        )
    )


def register_from(message: pb.NodeMessage) -> NodeInfo:
    """Raises ProtocolError if the message is no registration."""
    if not message.HasField("register"):
        raise ProtocolError("the first message of a node is not Register")
    told = message.register
    if not 0 < len(told.node_id) <= 128 or not told.node_id.isprintable():
        raise ProtocolError("register.node_id: 1 to 128 printable characters are wanted")
    return NodeInfo(
        node_id=NodeId(told.node_id),
        epoch=told.epoch,
        roles=frozenset(enum_from(Role, role, "register.roles") for role in told.roles),
        model_id=told.model_id,
        layout_id=told.layout_id,
        max_model_len=told.max_model_len,
        num_blocks=told.num_blocks,
        block_size=told.block_size,
        peer=peer_from(told.peer),
        host=told.host,
        protocol_version=told.protocol_version,
    )


def lease_to(lease: Lease) -> pb.ConductorMessage:
    return pb.ConductorMessage(
        registered=pb.Registered(
            lease_s=lease.lease_s,
            heartbeat_s=lease.heartbeat_s,
            conductor_epoch=lease.conductor_epoch,
        )
    )


def refused(reason: str) -> pb.ConductorMessage:
    """Return what a node is told in place of a lease."""
    return pb.ConductorMessage(refused=reason)


def lease_from(message: pb.ConductorMessage) -> Lease:
    """Raises ProtocolError if the message does not answer a registration, or refuses it."""
    if message.refused:
        raise ProtocolError(f"refused: {message.refused}")
    if not message.HasField("registered"):
        raise ProtocolError("the first message of the conductor is not Registered")
    told = message.registered
    if not 0 < told.heartbeat_s < told.lease_s:
        raise ProtocolError(f"registered: heartbeat {told.heartbeat_s} s, lease {told.lease_s} s")
    return Lease(told.lease_s, told.heartbeat_s, told.conductor_epoch)


def add_state(message: pb.NodeMessage, heartbeat: Heartbeat | None, kv_events: KvEvents | None) -> None:
    """Put a node's state beside its results."""
    if heartbeat is not None:
        message.heartbeat.CopyFrom(_heartbeat_to(heartbeat))
    if kv_events is not None:
        message.kv_events.CopyFrom(_kv_events_to(kv_events))


def _heartbeat_to(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        sequence=heartbeat.sequence,
        num_free_blocks=heartbeat.num_free_blocks,
        num_held_blocks=heartbeat.num_held_blocks,
        num_waiting=heartbeat.num_waiting,
        num_running=heartbeat.num_running,
        num_queued_tokens=heartbeat.num_queued_tokens,
        num_context_tokens=heartbeat.num_context_tokens,
        draining=heartbeat.is_draining,
        roles=sorted(role.value for role in heartbeat.roles),
        fence=heartbeat.fence,
        next_kv_event=heartbeat.next_kv_event,
    )


def heartbeat_from(message: pb.NodeMessage) -> Heartbeat | None:
    """Return the heartbeat in a node's message, if one is."""
    if not message.HasField("heartbeat"):
        return None
    told = message.heartbeat
    return Heartbeat(
        told.sequence,
        told.num_free_blocks,
        told.num_held_blocks,
        told.num_waiting,
        told.num_running,
        told.num_queued_tokens,
        told.num_context_tokens,
        told.draining,
        frozenset(enum_from(Role, role, "heartbeat.roles") for role in told.roles),
        told.fence,
        told.next_kv_event,
    )


def _kv_events_to(events: KvEvents) -> pb.KvEvents:
    return pb.KvEvents(
        first_number=events.first_number,
        snapshot=events.is_snapshot,
        stored=events.stored,
        removed=events.removed,
    )


def kv_events_from(message: pb.NodeMessage) -> KvEvents | None:
    """Return the KV events in a node's message, if any are."""
    if not message.HasField("kv_events"):
        return None
    told = message.kv_events
    return KvEvents(
        told.first_number,
        told.snapshot,
        hashes_from(told.stored, "kv_events.stored"),
        hashes_from(told.removed, "kv_events.removed"),
    )
