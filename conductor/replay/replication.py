"""Copies of hot prefixes in replay: the live `conductor/placing/replicas.py` decides, links carry them.

A copy is a flow beside fetches and hand-offs, and is in the target's cache when its last byte
came. Drops are not simulated: caches evict by use, and what is cold goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.replicas import Copy, Replicas
from conductor.replay.links import Flow, Links
from conductor.replay.sim_node import SimNode
from kvstore.index import Key

STEP_S = 1.0


class SimReplication:
    """Makes the copies of one run."""

    def __init__(
        self,
        cost: CostModel,
        view: ClusterView,
        links: Links,
        nodes: Mapping[NodeId, SimNode],
        store: Callable[[SimNode, Sequence[Key]], int],
    ) -> None:
        """`store` puts blocks into a node's cache and returns how many are new."""
        self._replicas = Replicas(cost)
        self._token_bytes = cost.profile.kv_token_bytes
        self._view = view
        self._links = links
        self._nodes = nodes
        self._store = store
        self.num_copies = 0
        self.bytes_copied = 0.0

    def placed(self, asked: PlacementRequest, placement: Placement, now_s: float) -> None:
        self._replicas.placed(asked, placement, self._view, now_s)

    def step(self, now_s: float) -> None:
        """Begin what is to be copied now."""
        for item in self._replicas.step(self._view, now_s):
            if isinstance(item, Copy):
                self._begin(item, now_s)

    def _begin(self, item: Copy, now_s: float) -> None:
        source, target = (
            self._nodes[self._view.node_at(slot).info.node_id]
            for slot in (item.source_slot, item.target_slot)
        )

        def arrived(moment_s: float) -> None:
            # what the source dropped meanwhile did not come
            self._store(target, item.chain[: source.cache.match(item.chain)])

        tokens = (len(item.chain) - item.first_block) * self._view.block_size
        self.num_copies += 1
        self.bytes_copied += tokens * self._token_bytes
        flow = Flow(source.sends, target.receives, tokens * self._token_bytes, inf, arrived)
        self._links.start(flow, now_s)
