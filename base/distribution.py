"""The mean and the percentiles of some values, by one rule for measured and for simulated ones."""

from __future__ import annotations

from array import array


def distribution(values: array[float]) -> dict[str, float]:
    """Return mean and percentiles (nearest rank), zeros where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    last = len(ordered) - 1
    ranks = {
        name: ordered[round(share * last)] for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    return {"mean": sum(ordered) / len(ordered), **ranks}
