"""Placement policies to compare, under the names of FAST'25 figure 5.

`global` is the whole of Algorithm 1 and `local` the same without fetching; `load` and `random` replace its
choice of the prefill node alone. Decode choice and admission are the same for all, so that a difference in
a report is a difference of the policy.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from conductor.placing.cluster_view import ClusterView
from conductor.placing.cost_model import CostModel
from conductor.placing.load_order import bits_of
from conductor.placing.placement import PlacementRequest
from conductor.placing.prefill_policies import POLICIES as LIVE_POLICIES
from conductor.placing.prefill_policies import PrefillChoice, depth_at
from conductor.placing.scheduler_settings import SchedulerSettings
from kvstore.index import Group

PAPER_POLICIES = ("random", "load", "local", "global")
"""The policies of the paper's figure, in its order: worst first."""

POLICIES = (*PAPER_POLICIES, *(name for name in LIVE_POLICIES if name not in PAPER_POLICIES))
"""The name of every policy that replay knows."""


def with_policy(settings: SchedulerSettings, name: str) -> SchedulerSettings:
    """Return settings under which `place` does as the policy `name` says; `random` has no settings."""
    policy = name if name in LIVE_POLICIES else settings.policy
    return replace(settings, policy=policy, fetches=settings.fetches and name not in ("local", "random"))


class RandomPrefill:
    """Any node, with equal chances; a seed makes it repeatable."""

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
        return PrefillChoice(request, slot, depth_at(slot, groups), view, cost, now_s)
