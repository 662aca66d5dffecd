"""The statistics that two of the rows need: whether two samples differ, and how a series rises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def ks_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how likely two samples of one distribution differ as much (the asymptotic formula)."""
    ordered = sorted([*((value, 1) for value in first), *((value, 0) for value in second)])
    below, distance = [0, 0], 0.0
    for value, group in itertools.groupby(ordered, key=lambda item: item[0]):
        assert value >= 0
        for _, is_first in group:
            below[is_first] += 1
        distance = max(distance, abs(below[1] / len(first) - below[0] / len(second)))
    size = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        return 1.0
    terms = ((1.0 if k % 2 else -1.0) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * sum(terms)))


def pooled_slope(series: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the least-squares slope of y over x that all of `series` share, each with a level of its own."""
    together, spread = 0.0, 0.0
    for points in series:
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        together += sum((x - mean_x) * (y - mean_y) for x, y in points)
        spread += sum((x - mean_x) ** 2 for x, _ in points)
    return together / spread if spread else 0.0
