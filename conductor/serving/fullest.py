"""The node that was fullest at each moment, and by which of its budgets: where the bottleneck was.

A budget is a share: the seconds of a node's queue of prompts over the bound on TTFT, those of its next decode
step over the bound on TBT, and the share of its KV blocks that requests hold. It is worked out when a row is
taken, with that row's own numbers, so that what is said of an hour ago is what was true then. Of a row the
name of one node is kept, so that the history of a large cluster takes little more than without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from base.config import SloConfig
from base.request import NodeId
from conductor.serving.ring import Ring

BUDGETS = ("queue", "step", "kv")
"""The budgets by their numbers, as the first columns of a node's row: `history.NODE_SERIES`."""


class Fullest:
    """The fullest node of each of the last rows."""

    def __init__(self, step_s: int, span_s: int, slo: SloConfig) -> None:
        self._ring = Ring(("budget", "share"), step_s, span_s)
        self._nodes: list[NodeId | None] = [None] * (span_s // step_s)
        self._bounds = slo.ttft_s or inf, slo.tbt_s or inf, 1.0

    def put(self, row: int, nodes: Mapping[NodeId, Sequence[float]]) -> None:
        """Keep which of some nodes is fullest; one that no number is known of is passed over."""
        if row < self._ring.next_row:
            return
        shares = [
            (value / bound, budget, node_id)
            for node_id, values in nodes.items()
            for budget, (value, bound) in enumerate(zip(values, self._bounds, strict=False))
            if value == value and bound < inf  # NaN: not its role
        ]
        if shares:
            share, budget, self._nodes[row % len(self._nodes)] = max(shares)
            self._ring.put(row, (budget, share))

    def to_json(self) -> dict[str, Any]:
        """Return the rows as `Ring.to_json` does, with the name of each row's node."""
        told = self._ring.to_json()
        kept = len(self._nodes)
        return {**told, "nodes": [self._nodes[row % kept] for row in range(told["first"], told["next"])]}
