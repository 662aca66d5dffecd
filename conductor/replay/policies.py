"""Placement policies to compare, under the names of FAST'25 figure 5.

`global` is the whole of Algorithm 1 and `local` the same without fetching: both are
`scheduler.place` with settings. `load` and `random` replace its choice of the prefill node
alone; decode choice and admission are the same for all, so that a difference in a report
is a difference of the policy.
"""

from __future__ import annotations

from random import Random

from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.placement import PlacementRequest
from conductor.placing.scheduler import PrefillChoice, PrefillPolicy, candidate, least_ttft
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group

POLICIES = ("random", "load", "local", "global")
"""In the order of the paper's figure, worst first."""


def prefill_policy(name: str, seed: int) -> PrefillPolicy:
    """Return the rule called `name`, one of POLICIES; `seed` makes `random` repeatable."""
    if name == "load":
        return least_loaded
    if name == "random":
        return RandomPrefill(seed).choose
    return least_ttft


def depth_at(slot: int, groups: list[Group]) -> int:
    """Return how many leading blocks the node in `slot` holds."""
    return next((depth for depth, mask in groups if mask >> slot & 1), 0)


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
    return candidate(request, slot, depth_at(slot, groups), view, cost, now_s)


class RandomPrefill:
    """Any node, with equal chances."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._mask = 0
        self._slots: list[int] = []

    def choose(
        self,
        request: PlacementRequest,
        groups: list[Group],
        view: ClusterView,
        cost: CostModel,
        settings: SchedulerSettings,
        now_s: float,
    ) -> PrefillChoice:
        """Return a random node of `view.prefill_mask`."""
        if view.prefill_mask != self._mask:
            self._mask = view.prefill_mask
            self._slots = bits_of(self._mask)
        slot = self._rng.choice(self._slots)
        return candidate(request, slot, depth_at(slot, groups), view, cost, now_s)
