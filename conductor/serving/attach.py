"""The stream that a node opens: registration, heartbeats, work and results.

    node                     conductor
    Register      ------->
                  <-------   Registered (lease, heartbeat), or refused: why
    Heartbeat, KvEvents ->   the snapshot of its blocks: the node has read Registered, and is a member
    Heartbeat ... ------->   every heartbeat_s; results as they come
                  <-------   work as it comes; a bare heartbeat when there is none

Either side that hears nothing for the lease treats the other as lost. What a node held
for the conductor ends with the stream, on both sides, with no message needed.

A conductor whose process stood still finds the past when it goes on. Streams on which it said nothing for
the lease are over at their nodes, whatever lies in their sockets: they end together, before any request is
placed again. Connections that nodes dialled meanwhile, and gave up, wait to be accepted, each with its
Register. So a node is a member when it has answered Registered, and not before.

Where there is TLS, who attaches has proved by its certificate to be a node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from base.clock import Clock
from base.errors import ForbiddenError, InvalidRequestError, ProtocolError, ServeError
from base.link import EARLY_S, MessageStream
from base.logs import event
from base.messages import Failed, Heartbeat, KvEvents, Prefill, Registered, Reserve, ToNode
from base.seldom import Seldom
from base.tls import NODE_NAME
from base.wire import (
    from_node_from,
    heartbeat_from,
    kv_events_from,
    lease_to,
    refused,
    register_from,
    to_node,
)
from conductor.serving.membership import Membership
from conductor.serving.nodes import NodeSession
from protos import nodes_pb2 as pb

log = logging.getLogger(__name__)

MOST_TOGETHER = 8
"""The most items that wait for the end of a turn of the event loop: as many as two requests have for a node.
Where all did, nodes had nothing to do until then, and the conductor nothing while they were at work."""
RELEASE_S = 0.002
"""How long a Release waits for something to go with: nobody waits for it, and a message is a system call."""


class AttachService:
    """Takes nodes in, each by a stream."""

    def __init__(
        self, membership: Membership, lease: Registered, clock: Clock, nodes_have_certificates: bool = False
    ) -> None:
        self.membership = membership
        self.lease = lease
        self.clock = clock
        self.nodes_have_certificates = nodes_have_certificates
        self.streams: set[NodeStream] = set()
        """The open ones."""
        self.seldom = Seldom(log, clock)

    def stream(self) -> NodeStream:
        """Return the end of one more connection."""
        return NodeStream(self)

    def end_overdue(self) -> None:
        """End the streams on which nothing was said for the lease: their nodes have left by now.

        All of them in one turn, so that no request of one is placed on the next.
        """
        now_s = asyncio.get_running_loop().time()
        overdue = [stream for stream in self.streams if stream.is_overdue(now_s)]
        error = TimeoutError(f"sent nothing for {self.lease.lease_s} s")
        self.membership.leave([each.session for each in overdue if each.session is not None], str(error))
        for stream in overdue:
            stream.give_up(error)


class NodeStream:
    """The end of one node's link (`base.link.End`). Belongs to the event loop."""

    def __init__(self, service: AttachService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self.session: NodeSession | None = None
        """The node, once it has sent Register."""
        self._is_member = False
        """Whether the node has answered Registered."""
        self._is_given_up = False
        self._is_flushing = False
        self._heard_at_s = self._said_at_s = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._later: asyncio.TimerHandle | None = None
        """The timer that sends what can wait."""

    def give_up(self, error: Exception) -> None:
        self._is_given_up = True
        self._link.close(error)

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the node has heard nothing for the lease, and so has left."""
        if self.session is None or self._is_given_up:
            return False
        return now_s >= self._said_at_s + self._service.lease.lease_s

    # base.link.End

    def opened(self, link: MessageStream) -> None:
        self._link = link
        self._service.streams.add(self)
        self._heard_at_s = self._loop.time()
        self._at("silence", self._heard_at_s + self._service.lease.lease_s, self._hear)

    def received(self, message: bytes) -> None:
        now_s = self._loop.time()
        if self.is_overdue(now_s):
            self._service.end_overdue()
            return
        try:
            parsed = pb.NodeMessage.FromString(message)
        except DecodeError as error:
            raise ProtocolError(f"no message of a node: {error}") from error
        if self.session is None:
            self._register(parsed)
            return
        if not self._is_member and not self._joins():
            return
        self._heard_at_s = now_s
        if items := from_node_from(parsed):
            self.session.deliver(items)
        heartbeat, kv_events = heartbeat_from(parsed), kv_events_from(parsed)
        if heartbeat is not None or kv_events is not None:
            # A turn for the requests and one for what they send: a node's state can wait.
            self._loop.call_soon(self._loop.call_soon, self._learn, heartbeat, kv_events)

    def writable(self) -> None:
        self._flush()

    def closed(self, error: Exception | None) -> None:
        if self.is_overdue(self._loop.time()):
            self._service.end_overdue()
        for timer in (*self._timers.values(), self._later):
            if timer is not None:
                timer.cancel()
        self._service.streams.discard(self)
        if self.session is not None:
            info, reason = self.session.info, str(error or "the stream ended")
            self._service.membership.leave([self.session], reason)
        if self._is_member:
            event(log, "node left", node_id=info.node_id, epoch=info.epoch, reason=reason)

    def _register(self, message: pb.NodeMessage) -> None:
        """Grant the node a lease. It is a member when it answers: it may have given this connection up."""
        try:
            if self._service.nodes_have_certificates and NODE_NAME not in self._link.peer_uris:
                raise ForbiddenError(f"only a node may attach: its certificate must name {NODE_NAME}")
            session = NodeSession(register_from(message), self._wake)
            self._service.membership.require_compatible(session.info)
        except ServeError as error:
            self._refuse(error)
            return
        self.session = session
        self._write(lease_to(self._service.lease))
        self._at("heartbeat", self._said_at_s + self._service.lease.heartbeat_s, self._beat)

    def _joins(self) -> bool:
        """Make the node a member; False where it was refused, because of one that joined meanwhile."""
        assert self.session is not None
        try:
            self._service.membership.join(self.session)
        except ServeError as error:
            self._refuse(error)
            return False
        self._is_member, info = True, self.session.info
        roles = "+".join(sorted(role.value for role in info.roles))
        event(log, "node joined", node_id=info.node_id, epoch=info.epoch, roles=roles)
        return True

    def _refuse(self, error: ServeError) -> None:
        self._service.seldom.event("node refused", type(error).__name__, reason=error)
        self._write(refused(f"{type(error).__name__}: {error}"))
        self._link.close()

    def _learn(self, heartbeat: Heartbeat | None, kv_events: KvEvents | None) -> None:
        assert self.session is not None
        membership = self._service.membership
        # In this order: the heartbeat says which events were sent by now.
        if kv_events is not None:
            membership.kv_events(self.session, kv_events)
        if heartbeat is not None:
            membership.heartbeat(self.session, heartbeat, self._service.clock.now_s())

    def _wake(self, num_waiting: int, is_urgent: bool) -> None:
        """Send what the session has: at the end of this turn of the event loop, where it is not much."""
        if num_waiting >= MOST_TOGETHER:
            self._flush()
        elif is_urgent:
            if not self._is_flushing:
                self._is_flushing = True
                self._loop.call_soon(self._flush)
        elif self._later is None:
            self._later = self._loop.call_later(RELEASE_S, self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self.session is None:
            return
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self.session.is_lost:
            # By a newer stream of the same node. Left open, this one would keep a node that
            # takes it for its own from ever attaching.
            self._link.close()
        elif not self._link.is_choked and (items := self.session.take_outgoing()):
            self._write(self._packed(items))

    def _packed(self, items: list[ToNode]) -> pb.ConductorMessage:
        """Pack items; one that cannot be packed is a fault of ours, and fails its own request alone."""
        try:
            return to_node(items)
        except (TypeError, ValueError, OverflowError):
            return to_node([item for item in items if self._can_pack(item)])

    def _can_pack(self, item: ToNode) -> bool:
        try:
            to_node((item,))
        except (TypeError, ValueError, OverflowError) as error:
            log.exception("a message to a node cannot be packed")
            whose = item.work if isinstance(item, Reserve | Prefill) else item
            request_id = getattr(whose, "request_id", None)
            if request_id is not None and self.session is not None:
                said = f"a number of the request cannot be sent: {error}"
                self.session.deliver((Failed(request_id, InvalidRequestError.__name__, said),))
            return False
        return True

    def _beat(self) -> None:
        heartbeat_s, now_s = self._service.lease.heartbeat_s, self._loop.time()
        if self.is_overdue(now_s):
            self._service.end_overdue()
            return
        due_s = self._said_at_s + heartbeat_s
        if due_s <= now_s + EARLY_S:
            due_s = now_s + heartbeat_s
            if not self._link.is_choked:
                self._write(to_node((), heartbeat=True))
        self._at("heartbeat", due_s, self._beat)

    def _hear(self) -> None:
        lease_s = self._service.lease.lease_s
        due_s = self._heard_at_s + lease_s
        if due_s > self._loop.time() + EARLY_S:
            self._at("silence", due_s, self._hear)
        else:
            self._link.close(TimeoutError(f"silent for {lease_s} s"))

    def _at(self, name: str, due_s: float, call: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_at(due_s, call)

    def _write(self, message: pb.ConductorMessage) -> None:
        self._link.send(message.SerializeToString())
        self._said_at_s = self._loop.time()
