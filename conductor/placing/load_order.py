"""Load order: the least loaded of any set of nodes, without looking at all of them.

Placement asks "who of these (a bit mask) is free first?" several times a request. Nodes
are kept sorted by a value: the moment their queue runs empty, or the tokens they hold.
Those whose value lies at or below a floor that only rises (the present) are idle, equal
among themselves, and found by one AND; the rest by a walk up the order, or over the
mask's own bits where it has few. Equal values go to the smaller node number, so that a
replayed trace places the same way twice.

A heap was weighed: it gives the least of all nodes, not of a given set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice

# To look at each node of a mask is cheaper than to walk an order of more than so many times as many.
WALKED = 10


def bits_of(mask: int, limit: int | None = None) -> list[int]:
    """Return the node numbers in a mask, ascending, `limit` of them at most."""
    nodes: list[int] = []
    while mask and len(nodes) != limit:
        rest = mask & (mask - 1)
        nodes.append((mask ^ rest).bit_length() - 1)
        mask = rest
    return nodes


class LoadOrder:
    """Nodes, small integers, ordered by a value. Every operation is O(log n) comparisons."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        """The value of each node, as it was last set; to be read only."""
        # Two lists of one order: numbers compare in a fraction of the time that pairs take.
        self._ordered_values: list[float] = []
        self._ordered_nodes: list[int] = []
        self._idle = 0
        # the last set that was walked for and its least, until a value changes
        self._walked = 0
        self._walked_to: int | None = None
        self.num_probes = 0
        """Entries looked at by `least`, for tests that bound the work."""

    def set(self, node: int, value: float) -> None:
        """Give `node` a value; adds it if it is unknown."""
        self._walked = 0
        self._take_out(node)
        self.values[node] = value
        values, nodes = self._ordered_values, self._ordered_nodes
        at = bisect_left(values, value)
        if at < len(values) and values[at] == value:
            at = self._place_of(value, node)
        values.insert(at, value)
        nodes.insert(at, node)

    def remove(self, node: int) -> None:
        """Forget `node`; an unknown one is passed over."""
        self._walked = 0
        self._take_out(node)
        self.values.pop(node, None)

    def settle(self, floor: float) -> Sequence[int]:
        """Count nodes whose value is at most `floor` as idle; return those that were not. It never falls."""
        values = self._ordered_values
        if not values or values[0] > floor:
            return ()
        end = bisect_right(values, floor)
        nodes = self._ordered_nodes[:end]
        self._walked = 0
        for node in nodes:
            self._idle |= 1 << node
        del values[:end], self._ordered_nodes[:end]
        return nodes

    def least(self, mask: int) -> int | None:
        """Return the least loaded node of `mask`; None where none of them is known."""
        idle = mask & self._idle
        if idle:
            return (idle & -idle).bit_length() - 1
        nodes = self._ordered_nodes
        if nodes and mask >> nodes[0] & 1:
            self.num_probes += 1
            return nodes[0]
        if not mask & (mask - 1):
            node = mask.bit_length() - 1
            return node if node in self.values else None
        if mask != self._walked:
            self._walked, self._walked_to = mask, self._walk(mask)
        return self._walked_to

    def _walk(self, mask: int) -> int | None:
        """Return the first of `mask` in the order."""
        if len(self._ordered_nodes) > WALKED * mask.bit_count():
            best, values = None, self.values
            self.num_probes += mask.bit_count()
            for node in bits_of(mask):
                if node in values and (best is None or values[node] < values[best]):
                    best = node
            return best
        for probes, node in enumerate(self._ordered_nodes, 1):
            if mask >> node & 1:
                self.num_probes += probes
                return node
        return None

    def most(self, mask: int, count: int) -> list[int]:
        """Return the `count` most loaded nodes of `mask`, the most loaded first; idle ones are none."""
        found = (node for node in reversed(self._ordered_nodes) if mask >> node & 1)
        return list(islice(found, count))

    def check(self) -> None:
        """Assert that every node is either idle or in the order, once, with its value."""
        order = list(zip(self._ordered_values, self._ordered_nodes, strict=True))
        ordered = {node: value for value, node in order}
        assert len(ordered) == len(order), "a node twice in the order"
        idle = set(bits_of(self._idle))
        assert not idle & ordered.keys(), "a node idle and in the order"
        assert idle | ordered.keys() == self.values.keys(), "a node lost"
        assert order == sorted(order), "the order is not sorted"
        assert all(self.values[node] == value for node, value in ordered.items()), "a value is stale"

    def _take_out(self, node: int) -> None:
        """Let `node` be neither idle nor in the order."""
        value = self.values.get(node)
        if value is None:
            return
        if self._idle >> node & 1:
            self._idle ^= 1 << node
        else:
            values, nodes = self._ordered_values, self._ordered_nodes
            at = bisect_left(values, value)
            if nodes[at] != node:
                at = self._place_of(value, node)
            del values[at], nodes[at]

    def _place_of(self, value: float, node: int) -> int:
        """Return where (value, node) is in the order, or belongs."""
        values, nodes = self._ordered_values, self._ordered_nodes
        at = bisect_left(values, value)
        if at < len(values) and values[at] == value and nodes[at] < node:
            at = bisect_left(nodes, node, at, bisect_right(values, value, at))
        return at
