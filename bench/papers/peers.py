"""Peers' placement rules, written from their published formulas, for comparison.

Each chooses the prefill node by its own cost function from what the view knows; decode
choice and admission stay ours, so that the rule alone is compared. None of them fetches.
All look at every node, as the originals do.

* `dynamo`: NVIDIA Dynamo 1.6's KV router: prefill blocks queued + own blocks - blocks matched, at least 0. A
  prefill node has no decode blocks. Its credits for lower tiers (0.75 of host memory) are left at 1.
* `llm-d`: llm-d 1.0's token-aware default, sticky until saturated: only nodes with 0.8 of the prompt, unless
  another is predicted 5 s sooner; among those the weighted scorers: share of the prompt matched (3), requests
  queued, from the longest queue to the shortest (2), and tokens queued, of 4,194,304 (1).
* `llm-d-load`: its older common configuration: share matched (2) and a load-aware score, which falls
  from 0.5 to 0 at 128 queued requests (1).
* `sglang`: cache_aware: the shortest queue where queues differ by more than 64 requests and
  1.5 times; else the best match above 0.3 of the prompt; else the node with the emptiest
  cache.
* `aibrix`: its prefill score: 0.1 for each percent that does not match, plus queued
  requests over the longest queue.
* `edpp`: drift plus penalty, the decision of the BLIS paper's searches: seconds queued times the seconds that
  the prompt adds, plus the seconds to its first token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.node_state import NodeState
from conductor.placing.placement import PlacementRequest
from conductor.placing.prefill_policies import PrefillChoice, PrefillPolicy
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group

SGLANG_LOAD_DIFFERENCE = 64
SGLANG_LOAD_RATIO = 1.5
SGLANG_MATCH = 0.3
LLMD_STICKY_MATCH = 0.8
LLMD_STICKY_PENALTY_S = 5.0
LLMD_PREFIX_WEIGHT = 3.0
LLMD_QUEUE_WEIGHT = 2.0
LLMD_FULL_TOKENS = 4_194_304
LLMD_LOAD_PREFIX_WEIGHT = 2.0
LLMD_FULL_QUEUE = 128
AIBRIX_PERCENT = 0.1


@dataclass(frozen=True, slots=True)
class Node:
    """A prefill node, as a peer's rule sees it."""

    state: NodeState
    matched: int
    """Leading blocks of the prompt that it holds."""
    choice: PrefillChoice
    """What it would take, by our cost model; most rules do not look."""
    cost: CostModel

    @property
    def queued_tokens(self) -> float:
        """Tokens of its queued prompts that are to be computed."""
        return tokens_to_compute(self.state, self.cost)


Rule = Callable[[PlacementRequest, list[Node], ClusterView], Node]


def dynamo(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the fewest blocks to compute, its queue's and the prompt's."""

    def cost(node: Node) -> tuple[float, int]:
        blocks = node.queued_tokens / view.block_size + len(request.chain) - node.matched
        return max(0.0, blocks), node.state.slot

    return min(nodes, key=cost)


def llm_d(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the highest weighted score, of nodes that hold most of the prompt unless they are saturated."""
    sticky = [node for node in nodes if node.matched >= LLMD_STICKY_MATCH * len(request.chain)]
    if sticky:
        soonest_s = min(node.choice.ready_s for node in nodes)
        if min(node.choice.ready_s for node in sticky) - soonest_s <= LLMD_STICKY_PENALTY_S:
            nodes = sticky
    queues = [node.state.num_queued for node in nodes]
    shortest, spread = min(queues), max(queues) - min(queues)

    def cost(node: Node) -> tuple[float, int]:
        prefix = node.matched / max(1, len(request.chain))
        queue = 1.0 - (node.state.num_queued - shortest) / spread if spread else 1.0
        load = 1.0 - min(1.0, node.queued_tokens / LLMD_FULL_TOKENS)
        return -(LLMD_PREFIX_WEIGHT * prefix + LLMD_QUEUE_WEIGHT * queue + load), node.state.slot

    return min(nodes, key=cost)


def llm_d_load(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the highest weighted score of prefix and load."""

    def cost(node: Node) -> tuple[float, int]:
        prefix = node.matched / max(1, len(request.chain))
        load = 0.5 * max(0.0, 1.0 - node.state.num_queued / LLMD_FULL_QUEUE)
        return -(LLMD_LOAD_PREFIX_WEIGHT * prefix + load), node.state.slot

    return min(nodes, key=cost)


def sglang(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the best match, unless queues are too uneven or nothing matches well."""
    shortest = min(nodes, key=lambda node: (node.state.num_queued, node.state.slot))
    longest = max(node.state.num_queued for node in nodes)
    uneven = longest - shortest.state.num_queued > SGLANG_LOAD_DIFFERENCE
    if uneven and longest > SGLANG_LOAD_RATIO * shortest.state.num_queued:
        return shortest
    best = min(nodes, key=lambda node: (-node.matched, node.state.slot))
    if best.matched > SGLANG_MATCH * len(request.chain):
        return best
    return min(nodes, key=lambda node: (view.index.num_blocks(node.state.slot), node.state.slot))


def aibrix(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the lowest prefill score."""
    longest = max(1, max(node.state.num_queued for node in nodes))

    def cost(node: Node) -> tuple[float, int]:
        percent = 100.0 * node.matched / max(1, len(request.chain))
        return (100.0 - percent) * AIBRIX_PERCENT + node.state.num_queued / longest, node.state.slot

    return min(nodes, key=cost)


def edpp(request: PlacementRequest, nodes: list[Node], view: ClusterView) -> Node:
    """Return the node with the least drift plus penalty."""

    def cost(node: Node) -> tuple[float, int]:
        choice = node.choice
        return choice.queue_s * choice.prefill_s + choice.ready_s, node.state.slot

    return min(nodes, key=cost)


RULES: dict[str, Rule] = {
    "dynamo": dynamo,
    "llm-d": llm_d,
    "llm-d-load": llm_d_load,
    "sglang": sglang,
    "aibrix": aibrix,
    "edpp": edpp,
}


def tokens_to_compute(node: NodeState, cost: CostModel) -> float:
    """Return the tokens of a node's queued prompts without what is matched of them, about.

    The view has whole prompts, and the seconds that they are predicted to take: so many tokens of each are
    computed as take those seconds after the rest of a prompt of mean length."""
    if not node.num_queued:
        return 0.0
    length = node.queued_tokens // node.num_queued
    mean_s = node.queued_s / node.num_queued / node.learned.prefill.ratio
    lengths = range(1, length)
    at = bisect_left(lengths, mean_s, key=lambda tokens: cost.prefill_s(tokens, length - tokens))
    return float((1 + at) * node.num_queued)


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
        nodes = []
        for slot in bits_of(view.prefill_mask):
            choice = PrefillChoice(request, slot, depths.get(slot, 0), view, cost, now_s)
            state = view.members[slot]
            nodes.append(Node(state, choice.local_blocks, choice, cost))
        return rule(request, nodes, view).choice

    return choose
