"""The bytes a grant covers, as a sorted set of ranges. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranges:
    """Half-open ranges, ascending; those that touch are one, so merged requests fit too."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def covers(self, offset: int, length: int) -> bool:
        """Return whether `length` >= 1 bytes from `offset` lie inside one range."""
        index = bisect.bisect_right(self.starts, offset) - 1
        return length > 0 and index >= 0 and offset + length <= self.ends[index]


def ranges_of(offsets: Sequence[int], length: int) -> Ranges:
    """Return the ranges of `length` bytes at each offset."""
    starts: list[int] = []
    ends: list[int] = []
    for offset in sorted(offsets):
        if ends and offset <= ends[-1]:
            ends[-1] = max(ends[-1], offset + length)
        else:
            starts.append(offset)
            ends.append(offset + length)
    return Ranges(tuple(starts), tuple(ends))
