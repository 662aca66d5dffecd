"""Gaps between tokens, counted: a run has millions of them, and its percentiles need no more than counts.

Gaps are counted by the logarithm of their length, in classes of which each is `WIDTH` longer than the one
before. A percentile is the middle of its class, at most half of `WIDTH` off.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp, floor, inf, log, log1p

from conductor.replay.segments import Segment

WIDTH = 0.005
_LOG_WIDTH = log1p(WIDTH)
_SHORTEST_S = 1e-9


class GapCounts:
    """How many gaps of a run have which length."""

    def __init__(self) -> None:
        self.num_gaps = 0
        self.longest_s = 0.0
        self._counts: dict[int, int] = {}

    def add(self, gaps: Iterable[Segment]) -> None:
        """Count gaps that grow evenly, segment by segment."""
        counts = self._counts
        for last_s, num_gaps, growth_s in gaps:
            self.num_gaps += num_gaps
            self.longest_s = max(self.longest_s, last_s)
            at, left = _class_of(last_s), num_gaps
            # the longest first, class by class
            while growth_s > 0 and at > _class_of(last_s - growth_s * (left - 1)):
                above = floor((last_s - exp(at * _LOG_WIDTH)) / growth_s) + 1
                taken = min(left - 1, max(1, above))
                counts[at] = counts.get(at, 0) + taken
                last_s -= growth_s * taken
                at, left = _class_of(last_s), left - taken
            counts[at] = counts.get(at, 0) + left

    def percentile_s(self, percent: float) -> float:
        """Return the gap that so many of a hundred are not longer than; 0 without any."""
        if not self.num_gaps:
            return 0.0
        wanted = max(1, ceil(self.num_gaps * percent / 100))
        at = -inf
        for at in sorted(self._counts):
            wanted -= self._counts[at]
            if wanted <= 0:
                break
        return min(self.longest_s, exp((at + 0.5) * _LOG_WIDTH))


def _class_of(gap_s: float) -> int:
    return floor(log(max(gap_s, _SHORTEST_S)) / _LOG_WIDTH)
