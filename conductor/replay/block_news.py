"""News of blocks: when a conductor hears what simulated nodes have stored and evicted.

As live (`base/attach.py`): a node says so after `WAKE_DELAY_S`, or with a message that it sends before, if it
did not say how it is within `STATE_GAP_S`; and always with the first token of a prompt that it has computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from base.attach import STATE_GAP_S, WAKE_DELAY_S
from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from kvstore.index import Key

Event = tuple[int, Sequence[Key], Sequence[Key]]
"""The number of the first event, blocks stored, and blocks evicted for them."""


@dataclass(slots=True)
class _Unsaid:
    """Events that one node has not said yet, the oldest first, and when it said something last."""

    events: deque[Event] = field(default_factory=deque)
    said_at_s: float = 0.0
    due_at_s: float = inf


class BlockNews:
    """News of all nodes' blocks for one view: whoever reads the view settles them before."""

    def __init__(self, view: ClusterView, view_delay_s: float) -> None:
        """Begin with nothing to say; above 0, the view hears so much later, whatever nodes say."""
        self._view = view
        self._view_delay_s = view_delay_s
        self._nodes: dict[NodeId, _Unsaid] = {}
        self._due: deque[tuple[float, NodeId, _Unsaid, Event | None]] = deque()
        """Moments in order; of one event alone, or of all that the node has not said."""

    def joined(self, node_id: NodeId) -> None:
        """Begin anew with a node: of one that has died nothing more is heard."""
        self._nodes[node_id] = _Unsaid()

    def stored(self, node_id: NodeId, event: Event, now_s: float) -> None:
        """Take in what a node has just stored, and is to say soon if no message takes it along before."""
        self.settle(now_s)
        unsaid = self._nodes[node_id]
        if self._view_delay_s:
            self._due.append((now_s + self._view_delay_s, node_id, unsaid, event))
        elif now_s == unsaid.said_at_s:  # what is said at one moment is one message
            self._view.kv_events(node_id, *event)
        else:
            unsaid.events.append(event)
            if unsaid.due_at_s == inf:
                unsaid.due_at_s = now_s + WAKE_DELAY_S
                self._due.append((unsaid.due_at_s, node_id, unsaid, None))

    def spoke(self, node_id: NodeId, now_s: float, has_computed: bool = False) -> None:
        """Take in that a node sends a message, which is the first token of a prompt if it `has_computed`."""
        self.settle(now_s)
        unsaid = self._nodes[node_id]
        if has_computed or now_s >= unsaid.said_at_s + STATE_GAP_S:
            self._say(node_id, unsaid, now_s)

    def settle(self, now_s: float) -> None:
        """Let the view have heard all that is heard until a moment."""
        due = self._due
        while due and due[0][0] <= now_s:
            at_s, node_id, unsaid, event = due.popleft()
            if self._nodes[node_id] is not unsaid:
                continue
            if event is not None:
                self._view.kv_events(node_id, *event)
            elif at_s == unsaid.due_at_s:  # else a message has taken all along before
                self._say(node_id, unsaid, at_s)

    def _say(self, node_id: NodeId, unsaid: _Unsaid, now_s: float) -> None:
        unsaid.said_at_s, unsaid.due_at_s = now_s, inf
        while unsaid.events:
            self._view.kv_events(node_id, *unsaid.events.popleft())
