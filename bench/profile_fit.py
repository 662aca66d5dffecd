"""Measured seconds to the coefficients of `conductor/cost_model.py`, and how far they can be trusted.

Least squares on relative errors, because a profile is asked about 16 tokens as often as
about 16,000, with no coefficient under 0: every term is a cost. There are four terms at
most, so every choice of those that are left at 0 is tried.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Terms = Callable[[float, float], list[float]]
"""(tokens, context) of a measurement to what each coefficient is multiplied with."""

SMALL_TOKENS = (0, 32, 64, 128, 256, 512, 1024)
"""Candidates for the tokens at which half of a small product's waste is left; 0: no waste."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one point; see `conductor.cost_model.Point`."""

    tokens: float
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, one for each term, and the relative error at each point when it is left out."""

    coefficients: tuple[float, ...]
    left_out_errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return statistics.fmean(self.left_out_errors)


def fit(points: Sequence[Measured], terms: Terms) -> Fit:
    """Return the fit of `terms` to at least as many points as there are terms, and one."""
    errors = []
    for index, point in enumerate(points):
        coefficients = _solve([*points[:index], *points[index + 1 :]], terms)
        errors.append(abs(_predicted(coefficients, point, terms) / point.seconds - 1))
    return Fit(_solve(points, terms), tuple(errors))


def fit_prefill(points: Sequence[Measured]) -> tuple[Fit, int]:
    """Return coefficients (fixed, token, token squared, small), and the tokens of the last."""
    fits = [(fit(points, _prefill_terms(small)), small) for small in SMALL_TOKENS]
    return min(fits, key=lambda item: item[0].mean_error)


def fit_decode(points: Sequence[Measured]) -> Fit:
    """Return coefficients (fixed, sequence, token of context)."""
    return fit(points, lambda batch, context: [1.0, batch, batch * context])


def _prefill_terms(small: int) -> Terms:
    return lambda new, prefix: [
        1.0,
        new,
        new * (new + 2.0 * prefix),
        small / (new + small) if small else 0.0,
    ]


def _predicted(coefficients: Sequence[float], point: Measured, terms: Terms) -> float:
    return sum(
        factor * term for factor, term in zip(coefficients, terms(point.tokens, point.context), strict=True)
    )


def _solve(points: Sequence[Measured], terms: Terms) -> tuple[float, ...]:
    seconds = np.array([point.seconds for point in points])
    matrix = np.array([terms(point.tokens, point.context) for point in points]) / seconds[:, None]
    width = matrix.shape[1]
    best, least = np.zeros(width), float("inf")
    for count in range(1, width + 1):
        for columns in itertools.combinations(range(width), count):
            part = matrix[:, columns]
            found = np.linalg.lstsq(part, np.ones(len(points)), rcond=None)[0]
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(width), error
                best[list(columns)] = found
    return tuple(best.tolist())
