"""The node that was fullest at each moment, by which of its budgets, and what rejected requests lacked then.

A row is worked out when it is taken, with that moment's own numbers (`budgets.py`), so that what is said of
an hour ago is what was true then. Where requests were rejected for want of a role, the fullest node is looked
for in that role: they say where the bottleneck is, and a queue that is short at one moment does not. Of a row
the name of one node is kept, so that the history of a large cluster takes little more than without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from base.request import NodeId
from conductor.placing.refused import LACKS
from conductor.serving.budgets import Limits
from conductor.serving.ring import Ring

NOTABLE = 0.01
"""Share of the requests of a row that, rejected for want of a role, makes it the bottleneck."""

BUDGETS_OF = {"prefill": (0,), "decode": (1, 2)}
"""The budgets of each role, by their numbers."""

COUNTS = ("came", *LACKS)
"""Requests that were decided on, and of those the rejected ones by what they lacked."""


class Fullest:
    """The fullest node of each of the last rows."""

    def __init__(self, step_s: int, span_s: int) -> None:
        self._ring = Ring(("budget", "share", *COUNTS), step_s, span_s)
        self._nodes: list[NodeId | None] = [None] * (span_s // step_s)
        self._counts: Counter[str] = Counter()
        """Requests that were decided on since a row was taken, by `COUNTS`."""

    def decided(self, lacked: str | None) -> None:
        """Count a request that was decided on, and what it lacked if it was rejected; None: it was placed."""
        self._counts["came"] += 1
        if lacked is not None:
            self._counts[lacked] += 1

    def put(self, row: int, nodes: Mapping[NodeId, Sequence[float]], limits: Limits) -> None:
        """Keep which of some nodes is fullest; one that no number is known of is passed over."""
        if row < self._ring.next_row:
            return
        counts = [self._counts[name] for name in COUNTS]
        self._counts.clear()
        meant = _meant(*counts)
        shares = [
            (budget in meant, share, budget, node_id)
            for node_id, values in nodes.items()
            for budget, share in enumerate(limits.shares(values))
            if share == share  # NaN: not its role
        ]
        if shares:
            _, share, budget, self._nodes[row % len(self._nodes)] = max(shares)
            self._ring.put(row, (budget, share, *counts))

    def counts(self, num_rows: int) -> dict[str, int]:
        """Return the numbers by `COUNTS` of the last rows."""
        _, rows = self._ring.rows(self._ring.next_row - num_rows)
        known = [row[2:] for row in rows if row[2] == row[2]]  # NaN: not taken
        return {name: int(sum(row[at] for row in known)) for at, name in enumerate(COUNTS)}

    def to_json(self) -> dict[str, Any]:
        """Return the rows as `Ring.to_json` does, with the name of each row's node."""
        rows = self._ring.to_json()
        kept = len(self._nodes)
        return {**rows, "nodes": [self._nodes[row % kept] for row in range(rows["first"], rows["next"])]}


def _meant(came: int, prefill: int, decode: int, speed: int) -> tuple[int, ...]:
    """Return the budgets of the role that rejected requests lacked; none: hardly any did."""
    if max(prefill, decode) < max(1.0, NOTABLE * came):
        return ()
    return BUDGETS_OF["prefill" if prefill >= decode else "decode"]
