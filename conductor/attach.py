"""The stream that a node opens: registration, heartbeats, work and results.

    node                     conductor
    Register      ------->
                  <-------   Registered (lease, heartbeat), or an error status that says why
    Heartbeat ... ------->   every heartbeat_s; results as they come
                  <-------   work as it comes; a bare heartbeat when there is none

Either side that hears nothing for the lease treats the other as lost. What a node held
for the conductor ends with the stream, on both sides, with no message needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from base.clock import Clock
from base.errors import ProtocolError, ServeError, status_of
from base.logs import event
from base.messages import Lease
from base.wire import from_node_from, to_node
from base.wire_membership import heartbeat_from, kv_events_from, lease_to, register_from
from conductor.membership import Membership
from conductor.nodes import NodeSession
from protos import nodes_pb2 as pb
from protos.nodes_pb2_grpc import NodesServicer

log = logging.getLogger(__name__)

RENEWAL = 0.02
"""Of a lease, that passes before it is renewed again."""

Context: TypeAlias = "grpc.aio.ServicerContext[pb.NodeMessage, pb.ConductorMessage]"


class AttachService(NodesServicer):
    """Serves `Nodes.Attach`."""

    def __init__(self, membership: Membership, lease: Lease, clock: Clock) -> None:
        self._membership = membership
        self._lease = lease
        self._clock = clock
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every stream; to be called before the server is stopped."""
        self._closing.set()

    async def Attach(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.NodeMessage], context: Context
    ) -> None:
        try:
            async with asyncio.timeout(self._lease.lease_s):
                first = await self._read(context)
            session = self._join(first)
        except ServeError as error:
            event(log, "node refused", level=logging.WARNING, reason=error)
            await context.abort(status_of(error), str(error))
        node_id = session.info.node_id
        reason = "the stream ended"
        try:
            await context.write(lease_to(self._lease))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(session, context))
                tasks.create_task(self._send(session, context))
                tasks.create_task(self._until_closed())
        except* TimeoutError:
            reason = f"silent for {self._lease.lease_s} s"
        except* _StreamEnded:
            pass
        except* ServeError as errors:
            reason = str(errors.exceptions[0])
        finally:
            self._membership.leave(session, reason)
            event(log, "node left", node_id=node_id, epoch=session.info.epoch, reason=reason)

    def _join(self, message: pb.NodeMessage) -> NodeSession:
        session = NodeSession(register_from(message))
        self._membership.join(session)
        info = session.info
        event(log, "node joined", node_id=info.node_id, epoch=info.epoch, roles=_roles(session))
        return session

    async def _read(self, context: Context) -> pb.NodeMessage:
        try:
            message = await context.read()
        except DecodeError as error:
            raise ProtocolError(f"no message of a node: {error}") from error
        if not isinstance(message, pb.NodeMessage):  # grpc.aio.EOF
            raise _StreamEnded
        return message

    async def _receive(self, session: NodeSession, context: Context) -> None:
        lease_s = self._lease.lease_s
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(lease_s) as lease:
            while True:
                message = await self._read(context)
                # To renew it for each message takes longer than to read one.
                if (ends_at := loop.time() + lease_s) - (lease.when() or 0.0) > lease_s * RENEWAL:
                    lease.reschedule(ends_at)
                await self._take(session, message)

    async def _take(self, session: NodeSession, message: pb.NodeMessage) -> None:
        if items := from_node_from(message):
            session.deliver(items)
            # A turn for the requests and one for what they send: KV events can wait.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        heartbeat = heartbeat_from(message)
        if heartbeat is not None:
            self._membership.heartbeat(session, heartbeat, self._clock.now_s())
        kv_events = kv_events_from(message)
        if kv_events is not None:
            self._membership.kv_events(session, kv_events)

    async def _until_closed(self) -> None:
        await self._closing.wait()
        raise _StreamEnded

    async def _send(self, session: NodeSession, context: Context) -> None:
        while True:
            items = await session.outgoing(self._lease.heartbeat_s, self._clock)
            if session.is_lost:
                # By a newer stream of the same node. Left open, this one would keep a node that
                # takes it for its own from ever attaching.
                raise _StreamEnded
            await context.write(to_node(items, heartbeat=not items))


class _StreamEnded(Exception):  # noqa: N818
    """One side closed the stream: an end, not an error."""


def _roles(session: NodeSession) -> str:
    return "+".join(sorted(role.value for role in session.info.roles))
