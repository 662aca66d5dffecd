"""The attached nodes, and which of them may serve together.

Belongs to the event loop; no I/O. `conductor/serving/attach.py` reports what happened, and the
scheduler's `ClusterView` is kept true here. One node id is attached once: a newer stream
of it ends the older one, so a node that restarted is never two nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from base.block_hash import BlockHash, chain_root
from base.clock import Clock
from base.errors import StaleError, UnavailableError
from base.logs import event
from base.messages import PROTOCOL_VERSION, Heartbeat, KvEvents, NodeInfo, TellBlocks
from base.request import NodeId, Request
from conductor.placing.cluster_view import ClusterView
from conductor.serving.nodes import NodeSession

log = logging.getLogger(__name__)

MAX_SNAPSHOT_PAUSE_S = 60.0
"""The longest pause between two snapshots that are asked of one node; the first is `SNAPSHOT_PAUSE_S`."""


class Membership:
    """The attached nodes of one conductor."""

    def __init__(self, model_id: str, view: ClusterView, clock: Clock) -> None:
        self._model_id = model_id
        self._view = view
        self._clock = clock
        self._sessions: dict[NodeId, NodeSession] = {}
        self._on_change: list[Callable[[], None]] = []
        self._on_heartbeat: list[Callable[[], None]] = []

    def on_change(self, call: Callable[[], None]) -> None:
        """Call `call` whenever a node has come or gone."""
        self._on_change.append(call)

    def on_heartbeat(self, call: Callable[[], None]) -> None:
        """Call `call` whenever a node's report has news for those who wait (`NodeState.heard`)."""
        self._on_heartbeat.append(call)

    def join(self, session: NodeSession) -> None:
        """Take a node in.

        Raises:
            StaleError: as `require_compatible` does. Nothing was changed.
        """
        info = session.info
        self.require_compatible(info)
        older = self._sessions.get(info.node_id)
        if older is not None:
            self.leave([older], "the node attached again")
        self._sessions[info.node_id] = session
        self._view.add_node(info, self._clock.now_s())
        self._notify_change()

    def leave(self, sessions: Sequence[NodeSession], reason: str) -> None:
        """Let nodes go, and end what they worked on. Leaving twice is nothing.

        They go at once: nothing is placed on one of them because another has left.
        """
        leaving = [each for each in sessions if self._sessions.get(each.info.node_id) is each]
        for session in leaving:
            del self._sessions[session.info.node_id]
            self._view.remove_node(session.info.node_id)
        for session in sessions:
            session.lose(reason)
        if leaving:
            self._notify_change()

    def heartbeat(self, session: NodeSession, heartbeat: Heartbeat, now_s: float) -> None:
        if self._sessions.get(session.info.node_id) is session:
            session.last_heartbeat, session.last_heartbeat_at_s = heartbeat, now_s
            has_news = self._view.heartbeat(session.info.node_id, heartbeat, now_s)
            self._mend_gap(session)
            for call in self._on_heartbeat if has_news else ():
                call()

    def kv_events(self, session: NodeSession, events: KvEvents) -> None:
        if self._sessions.get(session.info.node_id) is session:
            self._view.kv_events(
                session.info.node_id, events.first_number, events.stored, events.removed, events.is_snapshot
            )
            self._mend_gap(session)

    def chain_root(self, request: Request) -> BlockHash:
        """Return the root of the request's hash chain on the attached nodes.

        Raises:
            UnavailableError: no node is attached.
        """
        for session in self._sessions.values():
            if layout_id := session.info.layout_id:
                return chain_root(self._model_id, layout_id, request.tenant, request.cache_salt)
        raise UnavailableError("no node is attached")

    def session(self, node_id: NodeId) -> NodeSession:
        """Raises StaleError if the node has left since it was placed on."""
        try:
            return self._sessions[node_id]
        except KeyError:
            raise StaleError(f"node {node_id} has left") from None

    def in_control(self) -> bool:
        """Return whether what one conductor alone may do is for this one: every node says so."""
        beats = [session.last_heartbeat for session in self._sessions.values() if session.info.roles]
        return bool(beats) and all(beat is not None and beat.fence for beat in beats)

    def _mend_gap(self, session: NodeSession) -> None:
        """Ask for a snapshot where events were lost, seldom of a node that loses them always."""
        now_s = self._clock.now_s()
        if self._view.awaits_snapshot(session.info.node_id) and now_s >= session.snapshot_after_s:
            session.snapshot_after_s = now_s + session.snapshot_pause_s
            session.snapshot_pause_s = min(2 * session.snapshot_pause_s, MAX_SNAPSHOT_PAUSE_S)
            event(log, "kv events lost", level=logging.WARNING, node_id=session.info.node_id)
            session.send(TellBlocks())

    def _notify_change(self) -> None:
        for call in self._on_change:
            call()

    @property
    def sessions(self) -> list[NodeSession]:
        return list(self._sessions.values())

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """The latest of each node that has sent one."""
        return [each.last_heartbeat for each in self._sessions.values() if each.last_heartbeat]

    def require_compatible(self, info: NodeInfo) -> None:
        """Raise StaleError if the node cannot serve with this cluster: why, and what to change."""
        if info.protocol_version != PROTOCOL_VERSION:
            raise StaleError(
                f"node {info.node_id} speaks protocol {info.protocol_version}, this conductor "
                f"{PROTOCOL_VERSION}: run the same release on both"
            )
        if info.roles and info.model_id != self._model_id:
            raise StaleError(
                f"node {info.node_id} has model {info.model_id}, this conductor serves {self._model_id}"
            )
        self._view.require_compatible(info)
