"""How often a request may be lost, and which nodes it keeps away from afterwards."""

from __future__ import annotations

from base.request import NodeId

MAX_ATTEMPTS = 4
"""One, and three more when nodes are lost. A request that takes down every node it meets must not meet
them all."""
MAX_UNHEARD = 4
"""Attempts beside those, each of which ended before a node said anything: more often than not it was gone
before the request came."""


class Retries:
    """One request's attempts so far."""

    __slots__ = ("avoid", "num_attempts", "num_unheard")

    def __init__(self) -> None:
        self.num_attempts = 0
        self.num_unheard = 0
        self.avoid: tuple[NodeId, ...] = ()
        """Nodes that attempts failed at."""

    @property
    def may_try_again(self) -> bool:
        """Whether an attempt that is lost is followed by another."""
        return self.num_attempts - min(self.num_unheard, MAX_UNHEARD) < MAX_ATTEMPTS

    def failed_at(self, node_id: NodeId) -> None:
        """Have the next attempt placed elsewhere if it can be."""
        if node_id not in self.avoid:
            self.avoid += (node_id,)
