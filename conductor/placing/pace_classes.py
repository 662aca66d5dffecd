"""Pace classes: prefill nodes that are about as fast as each other, as bit masks.

Placement looks at one node of each depth and class: of two that hold the same of a prompt the one with the
shorter queue is better only where both are as fast. A class is a quarter of an e-fold wide, and a node stays
in its class until it is well outside, so that learning does not move it to and fro. A node whose pace is
doubted has two, one for prompts of usual length and one for longer ones: it is with those that share both.
"""

from __future__ import annotations

from math import log

WIDTH = 0.25
"""The width of a class, in the logarithm of measured over predicted seconds."""
SLACK = 0.75
"""Widths from the middle of its class at which a node leaves it."""

EVERYBODY = (-1,)
AS_PROFILED = (0, 0)
"""The classes of a node that is as fast as its profile says."""


class PaceClasses:
    """The class of each node, small integers as in `LoadOrder`; an unknown one is as its profile says."""

    def __init__(self) -> None:
        self._classes_of: dict[int, tuple[int, int]] = {}
        self._members: dict[tuple[int, int], int] = {}
        self.masks: tuple[int, ...] = EVERYBODY
        """The members of each class, fastest first, together every node; to be read only."""

    def set(self, node: int, ratio: float, measured_ratio: float) -> None:
        """Note how many times slower than its profile a node is, with longer prompts by `measured_ratio`."""
        known = self.classes_of(node)
        usual = _class_at(ratio, known[0])
        longer = usual if measured_ratio == ratio else _class_at(measured_ratio, known[1])
        if (usual, longer) != known:
            self.move(node, usual, longer)

    def classes_of(self, node: int) -> tuple[int, int]:
        """Return the class of a node with prompts of usual length, and with longer ones; 0: as profiled."""
        return self._classes_of.get(node, AS_PROFILED)

    def remove(self, node: int) -> None:
        """Forget a node; an unknown one is passed over."""
        if node in self._classes_of:
            self.move(node, *AS_PROFILED)

    def move(self, node: int, usual: int, longer: int) -> None:
        """Make these exactly a node's classes."""
        bit, chosen = 1 << node, (usual, longer)
        left = self._classes_of.pop(node, None)
        if left is not None:
            self._members[left] &= ~bit
            if not self._members[left]:
                del self._members[left]
        if chosen != AS_PROFILED:
            self._classes_of[node] = chosen
            self._members[chosen] = self._members.get(chosen, 0) | bit
        # those of class 0 are all that are in no other
        others = 0
        for mask in self._members.values():
            others |= mask
        masks = sorted([*self._members.items(), (AS_PROFILED, ~others)])
        self.masks = tuple(mask for _, mask in masks)


def _class_at(ratio: float, known: int) -> int:
    """Return the class of a node that was in a known one."""
    middle = log(ratio) / WIDTH
    return round(middle) if abs(middle - known) > SLACK else known
