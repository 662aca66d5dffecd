"""Pace classes: prefill nodes that are about as fast as each other, as bit masks.

Placement looks at one node of each depth and class: of two that hold the same of a prompt the one with the
shorter queue is better only where both are as fast. A class is a quarter of an e-fold wide, and a node stays
in its class until it is well outside, so that learning does not move it to and fro.
"""

from __future__ import annotations

from math import log

WIDTH = 0.25
"""The width of a class, in the logarithm of measured over predicted seconds."""
SLACK = 0.75
"""Widths from the middle of its class at which a node leaves it."""

EVERYBODY = (-1,)


class PaceClasses:
    """The class of each node, small integers as in `LoadOrder`; an unknown one is as its profile says."""

    def __init__(self) -> None:
        self._class_of: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self.masks: tuple[int, ...] = EVERYBODY
        """The members of each class, fastest first, together every node; to be read only."""

    def set(self, node: int, ratio: float) -> None:
        """Note how many times slower than its profile a node is."""
        middle = log(ratio) / WIDTH
        known = self._class_of.get(node, 0)
        if abs(middle - known) > SLACK:
            self.move(node, round(middle))

    def class_of(self, node: int) -> int:
        """Return the class of a node: 0 is as fast as its profile says."""
        return self._class_of.get(node, 0)

    def remove(self, node: int) -> None:
        """Forget a node; an unknown one is passed over."""
        if node in self._class_of:
            self.move(node, 0)

    def move(self, node: int, chosen: int) -> None:
        """Make this exactly a node's class."""
        bit = 1 << node
        left = self._class_of.pop(node, None)
        if left is not None:
            self._members[left] &= ~bit
            if not self._members[left]:
                del self._members[left]
        if chosen:
            self._class_of[node] = chosen
            self._members[chosen] = self._members.get(chosen, 0) | bit
        # those of class 0 are all that are in no other
        others = 0
        for mask in self._members.values():
            others |= mask
        masks = sorted([*self._members.items(), (0, ~others)])
        self.masks = tuple(mask for _, mask in masks)
