"""How often a request may be lost, and which nodes it keeps away from afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from base.request import NodeId

MAX_ATTEMPTS = 4
"""One, and three more when nodes are lost. A request that takes down every node it meets must not meet
them all."""
MAX_IDLE = 4
"""Attempts beside those, each of which ended before a node did anything.

It was gone before the request came, more often than not, or had no blocks to set aside."""


@dataclass(slots=True)
class Retries:
    """One request's attempts so far."""

    num_attempts: int = 0
    num_idle: int = 0
    avoid: tuple[NodeId, ...] = ()
    """Nodes that attempts failed at."""
    max_attempts: int = MAX_ATTEMPTS

    @property
    def may_try_again(self) -> bool:
        """Whether an attempt that is lost is followed by another."""
        return self.num_attempts - min(self.num_idle, MAX_IDLE) < self.max_attempts

    def failed_at(self, node_id: NodeId) -> None:
        """Have the next attempt placed elsewhere if it can be."""
        if node_id not in self.avoid:
            self.avoid += (node_id,)
