"""Prefill policies: which node computes a prompt. `scheduler.place` asks the one that its settings name.

A new policy is a function here and its line in `POLICIES`. It chooses among the prefill nodes of a view;
choosing the decode node, admission, recording and explaining are the same for all. `PrefillChoice` says what
a node would take by the cost model, and `compared` also with a fetch, and what others lose by it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from base.config import SchedulerConfig
from base.errors import ConfigError
from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.node_state import NodeState
from conductor.placing.placement import Placement, PlacementRequest
from conductor.placing.prompt_share import LEAST_SHARE, share_when_begun
from conductor.placing.scheduler_settings import RejectPolicy, SchedulerSettings
from kvstore.index import Group

# Holders to compare as a source: enough to spread over, few enough not to be a scan.
MAX_SOURCES = 8

# A second of recompute to come against one of this request: it is one of a queue that may be longer by then.
LATER = 2.0

# A line of so many prompts of usual length is long, if it takes so many seconds too.
LONG_LINE_PROMPTS = 3.0
LONG_LINE_S = 1.0
# One prefill node of so many has a long line: with more of them fewer are served in time, with fewer who is
# late waits longer.
LATE_NODES = 4

NOBODY: Group = (0, 0)


class PrefillChoice:
    """One candidate for the prefill of a request; a bare class because several are made for each."""

    __slots__ = (
        "cost_s",
        "fetch_s",
        "local_blocks",
        "matched_blocks",
        "matched_tokens",
        "node",
        "prefill_s",
        "prompt_share",
        "queue_s",
        "ready_s",
        "source",
    )

    def __init__(
        self,
        request: PlacementRequest,
        slot: int,
        depth: int,
        view: ClusterView,
        cost: CostModel,
        now_s: float,
    ) -> None:
        """Begin with what it takes for the node in `slot` to compute all after its own `depth` blocks."""
        self.node = node = view.members[slot]
        self.local_blocks = self.matched_blocks = depth
        self.matched_tokens = prefix = matched_tokens(request, depth, view)
        self.source: NodeState | None = None
        """The node that has the matched blocks after its own; None: nothing is fetched."""
        queue_s = view.prefill_order.values[slot] - now_s
        self.queue_s = queue_s = queue_s if queue_s > 0.0 else 0.0
        self.fetch_s = 0.0
        prefill_s = node.learned.prefill.corrected_s(cost.prefill_s(request.num_tokens - prefix, prefix))
        share = 1.0
        if node.decode_sequences:
            share = max(LEAST_SHARE, share_when_begun(node, cost))
            prefill_s /= share
        self.prefill_s = prefill_s
        self.prompt_share = share
        """The prompt's share of the node's time, beside sequences that decode there. In `prefill_s`."""
        self.ready_s = queue_s + prefill_s
        """Seconds until its last layer is computed: the longer of queue and fetch, and prefill."""
        self.cost_s = self.ready_s
        """Seconds that candidates are compared by: `ready_s`, and what others lose by the placement."""


PrefillPolicy = Callable[
    [PlacementRequest, list[Group], ClusterView, CostModel, SchedulerSettings, float], PrefillChoice
]
"""Chooses among `view.prefill_mask`, which is not empty; the groups are of all holders."""


def least_cost(
    request: PlacementRequest,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> PrefillChoice:
    """Return the prefill node that costs the fewest predicted seconds, or past capacity one of a long line.

    Who is placed at once and names no bound is neither refused nor ordered before the nodes. Past capacity
    all lines would grow alike, and everybody be late. So who would be late anywhere is late where most are
    already, and the other nodes serve those after it in time. The longest prompts are late first.
    """
    best = fewest_seconds(request, groups, view, cost, settings, now_s)
    if settings.ahead_s != inf or request.slo.ttft_slo_s != inf:
        return best
    line_s = max(LONG_LINE_S, LONG_LINE_PROMPTS * view.mean_prefill_s)
    if best.queue_s <= line_s or best.ready_s <= 2.0 * line_s or not view.mean_prefill_s:
        return best
    members = preferred(view.prefill_mask, request, view)
    late = view.prefill_order.most(members, max(1, members.bit_count() // LATE_NODES))
    rest = groups, view, cost, settings, now_s
    return min((compared(request, slot, depth_at(slot, groups), *rest) for slot in late), key=_cost_s)


def fewest_seconds(
    request: PlacementRequest,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> PrefillChoice:
    """Return the prefill node that costs the fewest predicted seconds, this request's and those of others.

    Algorithm 1 of arXiv 2407.00079, as `scheduler.py` has it, whatever the load is.
    """
    best: PrefillChoice | None = None
    rest = preferred(view.prefill_mask, request, view) if request.avoid else view.prefill_mask
    least, ends_s = view.prefill_order.least, view.prefill_order.values
    classes = view.paces.masks
    for depth, mask in (*groups, (0, rest)):
        members = mask & rest
        if not members:
            continue
        rest ^= members
        for pace in classes:
            if not (alike := members & pace) or (slot := least(alike)) is None:
                continue
            if best is not None and ends_s[slot] - now_s >= best.cost_s:
                continue  # its queue alone takes as long
            choice = compared(request, slot, depth, groups, view, cost, settings, now_s)
            if best is None or choice.cost_s < best.cost_s:
                best = choice
        if len(classes) == 1 and best is not None and best.ready_s <= best.prefill_s:
            break  # idle already: a shallower group of the same pace can only compute or fetch more
    assert best is not None, "prefill_mask is not empty, so some node is in some group"
    return best


def compared(
    request: PlacementRequest,
    slot: int,
    depth: int,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> PrefillChoice:
    """Return how the node in `slot`, which holds `depth` blocks, would do it, by itself or by a fetch.

        cost = max(ready, queue + hand-off)
               + (1 + behind) x LATER x blocks copied x share that evicts x price of a block

    A block that some node holds already is copied, whether it is fetched or computed, and what it evicts is
    computed again by somebody, and whoever is behind waits for that. That each second of this prefill delays
    those behind too was weighed, and lost: it sends prompts to their holders past the point where queues are
    even (`python -m bench.regimes`).
    """
    choice = PrefillChoice(request, slot, depth, view, cost, now_s)
    queue_s, ready_s = choice.queue_s, choice.ready_s
    # until its KV is sent, and what the copies that it makes take from others
    sent_s, others_s = queue_s, 0.0
    if request.max_tokens:
        sent_s += cost.transfer_s(request.num_tokens)
    most_blocks, holders = groups[0] if groups else NOBODY
    if depth < most_blocks and view.copy_price.block_s:
        others_s = copy_s(view) * (most_blocks - depth) * choice.node.evict_share
    choice.cost_s = (ready_s if ready_s > sent_s else sent_s) + others_s
    if request.avoid:
        most_blocks, holders = deepest_holders(request, groups, view)
    if depth >= most_blocks or not settings.fetches:
        return choice
    source = best_source(holders, view)
    fetched = matched_tokens(request, most_blocks, view)
    share = cost.fetch_share(source.num_queued > 0, source.num_outgoing)
    fetch_s = cost.transfer_s(fetched - choice.matched_tokens, share)
    prefill_s = choice.node.learned.prefill.corrected_s(cost.prefill_s(request.num_tokens - fetched, fetched))
    prefill_s /= choice.prompt_share
    ready_s = (queue_s if queue_s > fetch_s else fetch_s) + prefill_s
    cost_s = (ready_s if ready_s > sent_s else sent_s) + others_s
    threshold = settings.kvcache_balancing_threshold
    if cost_s < choice.cost_s if threshold is None else most_blocks >= threshold * depth:
        choice.source, choice.matched_blocks, choice.matched_tokens = source, most_blocks, fetched
        choice.fetch_s, choice.prefill_s, choice.ready_s, choice.cost_s = fetch_s, prefill_s, ready_s, cost_s
    return choice


def copied_s(
    request: PlacementRequest,
    placement: Placement,
    computing: NodeState,
    decoding: NodeState,
    groups: list[Group],
    view: ClusterView,
) -> float:
    """Return what the blocks cost others that a placement stores twice: on a prefill and a decode node.

    Those that some node holds already are stored again where the prompt is computed, and all are where
    it is handed over to.
    """
    if not view.copy_price.block_s:
        return 0.0
    block_s = copy_s(view)
    held = groups[0][0] if groups else 0
    seconds = (held - placement.local_blocks) * computing.evict_share * block_s
    if decoding is not computing:
        moved = len(request.chain) - placement.decode_matched_blocks
        seconds += moved * decoding.evict_share * block_s
    return seconds


def copy_s(view: ClusterView) -> float:
    """Return the seconds that a block copied takes from others, in a cache that is full."""
    # a second of a prefill node's time delays its share of those that wait or queue
    num_behind = (view.num_waiting + view.num_queued) / view.num_prefill
    return LATER * view.copy_price.block_s * (1.0 + num_behind)


def least_loaded(
    request: PlacementRequest,
    groups: list[Group],
    view: ClusterView,
    cost: CostModel,
    settings: SchedulerSettings,
    now_s: float,
) -> PrefillChoice:
    """Return the node whose queue ends first, whatever it holds."""
    slot = view.prefill_order.least(view.prefill_mask)
    assert slot is not None, "prefill_mask is not empty"
    return PrefillChoice(request, slot, depth_at(slot, groups), view, cost, now_s)


POLICIES: dict[str, PrefillPolicy] = {"global": least_cost, "load": least_loaded}
"""Every policy by the name that `scheduler.policy` of cluster.yaml and `conductor replay` know it by."""


def preferred(mask: int, request: PlacementRequest, view: ClusterView) -> int:
    """Return those of `mask` that failed no attempt of the request; all, if each did."""
    return mask & ~view.mask_of(request.avoid) or mask


def deepest_holders(request: PlacementRequest, groups: list[Group], view: ClusterView) -> Group:
    """Return the deepest of `groups` to fetch from, without nodes that failed the request."""
    avoided = view.mask_of(request.avoid)
    return next(((depth, mask & ~avoided) for depth, mask in groups if mask & ~avoided), NOBODY)


def _cost_s(choice: PrefillChoice) -> float:
    return choice.cost_s


def depth_at(slot: int, groups: list[Group]) -> int:
    """Return how many leading blocks the node in `slot` holds."""
    for depth, mask in groups:
        if mask >> slot & 1:
            return depth
    return 0


def matched_tokens(request: PlacementRequest, blocks: int, view: ClusterView) -> int:
    """Return the prompt tokens in `blocks` leading blocks; the last token is always computed."""
    tokens, last = blocks * view.block_size, request.num_tokens - 1
    return tokens if tokens < last else last


def best_source(mask: int, view: ClusterView) -> NodeState:
    """Return the holder with the fewest fetches from it, among the first few."""
    best: NodeState | None = None
    for _ in range(MAX_SOURCES):
        lowest = mask & -mask
        node = view.members[lowest.bit_length() - 1]
        if best is None or node.num_outgoing < best.num_outgoing:
            best = node
        mask ^= lowest
        if not mask or not best.num_outgoing:
            break
    assert best is not None, "whoever fetches has a holder"
    return best


def scheduler_settings(config: SchedulerConfig) -> SchedulerSettings:
    """Return the `scheduler` section of cluster.yaml as settings; raises ConfigError: no such policy."""
    if config.policy not in POLICIES:
        raise ConfigError(f"scheduler.policy {config.policy!r}: one of {', '.join(POLICIES)}")
    return SchedulerSettings(
        policy=config.policy,
        reject=RejectPolicy(config.reject),
        fetches=config.fetch,
        kvcache_balancing_threshold=config.kvcache_balancing_threshold or None,
        roles_follow=config.roles == "follow",
        ttft_headroom=config.ttft_headroom,
        ahead_s=config.ahead_s,
    )
