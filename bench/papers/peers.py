"""Peers' placement rules, written from their published formulas, for comparison.

Each chooses the prefill node by its own cost function from what the view knows; decode
choice and admission stay ours, so that the rule alone is compared. None of them fetches.
All look at every node, as the originals do.

* `dynamo`: NVIDIA Dynamo's KV router: prefill blocks queued + own blocks - blocks matched.
* `llm-d`: its scorers, weighted: share of the prompt matched (weight 2) and the load-aware
  score, which falls from 0.5 to 0 at 128 queued requests (weight 1). The weights are a
  common configuration, not a constant of theirs.
* `sglang`: cache_aware: the shortest queue where queues differ by more than 64 requests and
  1.5 times; else the best match above 0.3 of the prompt; else the node with the emptiest
  cache.
* `aibrix`: its prefill score: 0.1 for each percent that does not match, plus queued
  requests over the longest queue.
"""

from __future__ import annotations

from collections.abc import Callable

from conductor.placing.cluster_view import ClusterView, NodeState
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.placement import PlacementRequest
from conductor.placing.prefill_policies import PrefillChoice, PrefillPolicy, candidate
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group

Node = tuple[NodeState, int]
"""(a prefill node, leading blocks of the prompt that it holds)."""

Rule = Callable[[PlacementRequest, list[Node], ClusterView], Node]

SGLANG_LOAD_DIFFERENCE = 64
SGLANG_LOAD_RATIO = 1.5
SGLANG_MATCH = 0.3
LLMD_PREFIX_WEIGHT = 2.0
LLMD_FULL_QUEUE = 128
AIBRIX_PERCENT = 0.1


def dynamo(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the fewest blocks to compute, its queue's and the prompt's."""

    def cost(node: Node) -> tuple[float, int]:
        state, matched = node
        return state.queued_tokens / view.block_size + len(request.chain) - matched, state.slot

    return min(nodes, key=cost)


def llm_d(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the highest weighted score."""

    def cost(node: Node) -> tuple[float, int]:
        state, matched = node
        prefix = matched / max(1, len(request.chain))
        load = 0.5 * max(0.0, 1.0 - state.num_queued / LLMD_FULL_QUEUE)
        return -(LLMD_PREFIX_WEIGHT * prefix + load), state.slot

    return min(nodes, key=cost)


def sglang(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the best match, unless queues are too uneven or nothing matches well."""
    shortest = min(nodes, key=lambda node: (node[0].num_queued, node[0].slot))
    longest = max(node[0].num_queued for node in nodes)
    uneven = longest - shortest[0].num_queued > SGLANG_LOAD_DIFFERENCE
    if uneven and longest > SGLANG_LOAD_RATIO * shortest[0].num_queued:
        return shortest
    best = min(nodes, key=lambda node: (-node[1], node[0].slot))
    if best[1] > SGLANG_MATCH * len(request.chain):
        return best
    return min(nodes, key=lambda node: (view.index.num_blocks(node[0].slot), node[0].slot))


def aibrix(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the lowest prefill score."""
    longest = max(1, max(node[0].num_queued for node in nodes))

    def cost(node: Node) -> tuple[float, int]:
        state, matched = node
        percent = 100.0 * matched / max(1, len(request.chain))
        return (100.0 - percent) * AIBRIX_PERCENT + state.num_queued / longest, state.slot

    return min(nodes, key=cost)


RULES: dict[str, Rule] = {"dynamo": dynamo, "llm-d": llm_d, "sglang": sglang, "aibrix": aibrix}


def peer_policy(name: str) -> PrefillPolicy:
    """Return the rule of a peer, one of RULES, as a policy."""
    rule = RULES[name]

    def choose(
        request: PlacementRequest,
        groups: list[Group],
        view: ClusterView,
        cost: CostModel,
        settings: SchedulerSettings,
        now_s: float,
    ) -> PrefillChoice:
        depths = {slot: depth for depth, mask in groups for slot in bits_of(mask)}
        nodes = [(view.node_at(slot), depths.get(slot, 0)) for slot in bits_of(view.prefill_mask)]
        state, matched = rule(request, nodes, view)
        return candidate(request, state.slot, matched, view, cost, now_s)

    return choose
