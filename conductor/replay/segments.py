"""Segments: steps that went alike on one simulated engine, for as long as somebody runs who was in them."""

from __future__ import annotations

from math import ceil, sqrt

# Segments kept for sequences that ended are dropped when so many have gathered.
TRIM_AT = 4096

Segment = tuple[float, int, float]
"""Token gaps that grow evenly: (seconds of the last and longest, gaps, growth of each next)."""


def steps_begun(elapsed_s: float, first_s: float, growth_s: float) -> int:
    """Return how many steps have begun, at least one, each `growth_s` longer than the one before."""
    linear = first_s - growth_s / 2
    begun = 2 * elapsed_s / (linear + sqrt(linear * linear + 2 * growth_s * elapsed_s))
    return max(1, ceil(begun - 1e-9))


class Segments:
    """The segments of one engine, numbered from 0."""

    def __init__(self) -> None:
        self._kept: list[Segment] = []
        self._num_dropped = 0

    def add(self, last_s: float, steps: int, growth_s: float) -> None:
        """Note a segment that has ended."""
        self._kept.append((last_s, steps, growth_s))

    @property
    def next_number(self) -> int:
        """The number of the next segment."""
        return self._num_dropped + len(self._kept)

    @property
    def is_long(self) -> bool:
        """Whether so many are kept that it is worth forgetting some."""
        return len(self._kept) >= TRIM_AT

    def gaps_from(self, number: int, waited_s: float) -> list[Segment]:
        """Return the gaps of a sequence in all segments from one on; the first was longer by `waited_s`."""
        gaps = self._kept[number - self._num_dropped :]
        if gaps:
            last_s, count, growth_s = gaps[0]
            first_s = last_s - growth_s * (count - 1)
            gaps[0] = (waited_s + first_s, 1, 0.0)
            if count > 1:
                gaps.append((last_s, count - 1, growth_s))
        return gaps

    def forget_before(self, number: int | None) -> None:
        """Forget the segments before one; None: all."""
        end = self.next_number if number is None else number
        del self._kept[: end - self._num_dropped]
        self._num_dropped = end
