"""A simulated node: an engine that prefills and decodes, a cache, a link.

Which of both it is given is the view's business.
"""

from __future__ import annotations

from base.request import NodeId
from conductor.replay.block_cache import Cache
from conductor.replay.links import Link
from conductor.replay.sim_engine import SimEngine


class SimNode:
    """An engine, a cache in host memory, a link each way; of a pipelined group, its stages."""

    __slots__ = (
        "cache",
        "engine",
        "epoch",
        "free_at_s",
        "next_event",
        "node_id",
        "receives",
        "sends",
    )

    def __init__(
        self, node_id: NodeId, cache: Cache, engine: SimEngine, link_rate: float, stages: int = 1
    ) -> None:
        self.node_id = node_id
        self.cache = cache
        self.engine = engine
        self.free_at_s = [0.0] * stages if stages > 1 else []
        """When each stage of a pipelined group is free."""
        self.sends = Link(link_rate)
        self.receives = Link(link_rate)
        self.epoch = 1
        self.next_event = 1
