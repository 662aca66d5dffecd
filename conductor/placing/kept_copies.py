"""Kept copies: of two nodes that have a prompt after its hand-off, the one that keeps it longer.

While caches have room both copies stay, and whoever comes next finds either. When they are full one of the
two nodes evicts its copy before all that it keeps itself. So two caches hold as much as both together, not
the same twice, and what one node lacks it fetches from the other.

Nodes take turns, so that each keeps a share of the prompts like its share of the memory that nobody uses on
both. Where nothing is fetched, or computing a prompt is sooner, prefill nodes keep all: a decode node's copy
would spare nobody the prefill.
"""

from __future__ import annotations

from base.request import NodeId
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.scheduler_settings import SchedulerSettings

# Multiples of it, without their integers, are spread evenly from the first few on.
GOLDEN = 0.6180339887498949


class KeptCopies:
    """The turns in which the nodes of one conductor keep what is handed over."""

    def __init__(self, cost: CostModel, settings: SchedulerSettings) -> None:
        self._cost = cost
        self._fetches = settings.fetches
        self._num_handed_over = 0

    def evict_first_on(
        self, request: PlacementRequest, placement: Placement, view: ClusterView
    ) -> NodeId | None:
        """Return the node that evicts a prompt first once it is handed over; None: one node alone has it."""
        if placement.prefill_node == placement.decode_node or request.max_tokens <= 1:
            return None  # a decode node keeps nothing of what it does not decode
        tokens, cost = request.num_tokens, self._cost
        if not self._fetches or cost.transfer_s(tokens) >= cost.prefill_s(tokens, 0):
            return placement.decode_node
        self._num_handed_over += 1
        prefill_tokens = max(1.0, view.node(placement.prefill_node).free_tokens())
        decode_tokens = max(1.0, view.node(placement.decode_node).free_tokens())
        keeps = self._num_handed_over * GOLDEN % 1.0 < prefill_tokens / (prefill_tokens + decode_tokens)
        return placement.decode_node if keeps else placement.prefill_node
