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

from bisect import bisect_left, insort
from math import inf

# Up to this many bits it is cheaper to look at each than to walk a long order.
FEW_NODES = 8
LONG_ORDER = 64


def bits_of(mask: int, limit: int | None = None) -> list[int]:
    """Return the node numbers in a mask, ascending, `limit` of them at most."""
    nodes: list[int] = []
    while mask and len(nodes) != limit:
        lowest = mask & -mask
        nodes.append(lowest.bit_length() - 1)
        mask ^= lowest
    return nodes


class LoadOrder:
    """Nodes, small integers, ordered by a value. Every operation is O(log n) comparisons."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int]] = {}
        self._order: list[tuple[float, int]] = []
        self._idle = 0
        self.num_probes = 0
        """Entries looked at by `least`, for tests that bound the work."""

    def value(self, node: int) -> float:
        """Return what `set` was last told of `node`."""
        return self._entries[node][0]

    def set(self, node: int, value: float) -> None:
        """Give `node` a value; adds it if it is unknown."""
        order = self._order
        known = self._entries.get(node)
        if known is not None:
            if self._idle >> node & 1:
                self._idle ^= 1 << node
            else:
                del order[bisect_left(order, known)]
        self._entries[node] = entry = (value, node)
        insort(order, entry)

    def remove(self, node: int) -> None:
        """Forget `node`; an unknown one is passed over."""
        known = self._entries.pop(node, None)
        if known is None:
            return
        if self._idle >> node & 1:
            self._idle ^= 1 << node
        else:
            del self._order[bisect_left(self._order, known)]

    def settle(self, floor: float) -> None:
        """Count nodes whose value is at most `floor` as idle. The floor never falls."""
        order = self._order
        if order and order[0][0] <= floor:
            end = bisect_left(order, (floor, inf))
            for _, node in order[:end]:
                self._idle |= 1 << node
            del order[:end]

    def least(self, mask: int) -> int | None:
        """Return the least loaded node of `mask`; None where none of them is known."""
        idle = mask & self._idle
        if idle:
            return (idle & -idle).bit_length() - 1
        if not mask & (mask - 1):
            node = mask.bit_length() - 1
            return node if node in self._entries else None
        if len(self._order) > LONG_ORDER and mask.bit_count() <= FEW_NODES:
            known = [self._entries[node] for node in bits_of(mask) if node in self._entries]
            self.num_probes += len(known)
            return min(known)[1] if known else None
        for probes, (_, node) in enumerate(self._order, 1):
            if mask >> node & 1:
                self.num_probes += probes
                return node
        return None

    def check(self) -> None:
        """Assert that every node is either idle or in the order, once, with its value."""
        ordered = {node: value for value, node in self._order}
        assert len(ordered) == len(self._order), "a node twice in the order"
        idle = set(bits_of(self._idle))
        assert not idle & ordered.keys(), "a node idle and in the order"
        assert idle | ordered.keys() == self._entries.keys(), "a node lost"
        assert self._order == sorted(self._order), "the order is not sorted"
        assert all(self._entries[node] == (value, node) for node, value in ordered.items()), (
            "a value is stale"
        )
