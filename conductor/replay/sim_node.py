"""A simulated node: an engine that prefills and decodes, a cache, a link.

Which of both it is given is the view's business.
"""

from __future__ import annotations

from conductor.placing.cost_model import CostModel
from conductor.replay.block_cache import Cache, TieredCache
from conductor.replay.cluster_options import NodeSpec
from conductor.replay.links import SimLink
from conductor.replay.sim_engine import SimEngine


class SimNode:
    """An engine, a cache in host memory, a link each way; of a pipelined group, its stages."""

    def __init__(self, spec: NodeSpec, cost: CostModel, cache: Cache, engine: SimEngine) -> None:
        self.spec = spec
        self.node_id = spec.node_id
        self.cost = cost
        self.cache = cache
        self.disk = cache if isinstance(cache, TieredCache) else None
        self.engine = engine
        self.free_at_s = [0.0] * spec.stages if spec.stages > 1 else []
        """When each stage of a pipelined group is free."""
        self.sends = SimLink(spec.profile.transfer_bytes_per_s)
        self.receives = SimLink(spec.profile.transfer_bytes_per_s)
        self.epoch = 1
        self.next_event = 1
