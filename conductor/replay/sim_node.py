"""A simulated node: an engine that prefills and decodes, a cache, a link.

Which of both it is given is the view's business.
"""

from __future__ import annotations

from base.grants import PeerDescriptor
from base.messages import NodeInfo
from base.request import Role
from conductor.placing.cost_model import CostModel
from conductor.replay.block_cache import Cache
from conductor.replay.cluster_options import NodeSpec
from conductor.replay.links import SimLink
from conductor.replay.sim_engine import SimEngine


class SimNode:
    """An engine, a cache in host memory, a link each way; of a pipelined group, its stages."""

    __slots__ = (
        "cache",
        "cost",
        "engine",
        "epoch",
        "free_at_s",
        "has_disk",
        "next_event",
        "node_id",
        "receives",
        "request_s",
        "sends",
        "spec",
    )

    def __init__(self, spec: NodeSpec, cost: CostModel, cache: Cache, engine: SimEngine) -> None:
        profile = spec.profile
        self.spec = spec
        self.node_id = spec.node_id
        self.cost = cost
        self.cache = cache
        self.engine = engine
        self.request_s = profile.request_s
        self.has_disk = profile.disk_kv_tokens > 0
        self.free_at_s = [0.0] * spec.stages if spec.stages > 1 else []
        """When each stage of a pipelined group is free."""
        self.sends = SimLink(profile.transfer_bytes_per_s)
        self.receives = SimLink(profile.transfer_bytes_per_s)
        self.epoch = 1
        self.next_event = 1

    def info(self, roles: frozenset[Role], block_size: int) -> NodeInfo:
        """Return what the node would attach with."""
        return NodeInfo(
            node_id=self.node_id,
            epoch=self.epoch,
            roles=roles,
            model_id="",
            layout_id="",
            max_model_len=0,
            num_blocks=self.spec.profile.device_kv_tokens // block_size,
            block_size=block_size,
            peer=PeerDescriptor(self.node_id, self.epoch, ()),
            host="",
        )
