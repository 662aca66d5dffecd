"""Measured seconds to the coefficients of `conductor/placing/cost_model.py`, and how far they can be trusted.

Decode is fitted by itself. A prompt is a step whose one chunk is all of it: prompts and steps that have a
chunk beside sequences are fitted together. Where no steps were measured, prefill is fitted by itself.

Least squares on relative errors, because a profile is asked about 16 tokens as often as
about 16,000; of steps with prompts on errors relative to the square root of the seconds, because
those are what others wait for. No coefficient is under 0: every term is a cost. There are six terms at
most, so every choice of those that are left at 0 is tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from base.step_cost import hit_share
from conductor.placing.cost_model import CostModel
from conductor.placing.profile import Evidence, Point, Profile, StepPoint

Terms = Callable[[float, float], list[float]]
"""(tokens, context) of a measurement to what each coefficient is multiplied with."""

LEAST_S = 1e-9
"""Least seconds of a term that a profile must have: the fit of noise may leave nothing for it."""

ATTENTION_ROWS = (1, 128, 256, 512, 1024)
"""Candidates for `Profile.attention_rows`."""

SMALL_TOKENS = (0, 32, 64, 128, 256, 512, 1024)
"""Candidates for the tokens at which half of a small product's waste is left; 0: no waste."""


EXPERT_SHARES = (0.0, 1 / 64, 1 / 32, 3 / 64, 1 / 16, 3 / 32, 1 / 8, 1 / 4)
"""Candidates for `Profile.expert_share`; 0: no experts."""

CLEARLY = 0.7
"""Experts are believed in where the error with them is less than so much of that without."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one point; see `conductor.placing.cost_model.Point`."""

    tokens: float
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of a step with a chunk of `tokens` after `prefix`, beside `batch` sequences."""

    tokens: int
    prefix: float
    batch: int
    context: float
    """Tokens of each sequence."""
    seconds: float

    @property
    def attended(self) -> float:
        """See `StepCost.with_chunks_s`."""
        return self.tokens * (self.tokens + 2 * self.prefix)

    def predicted_s(self, cost: CostModel) -> float:
        context_tokens = round(self.batch * self.context)
        return cost.step.with_chunks_s(self.tokens, self.attended, self.batch, context_tokens)


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


def fit_decode(points: Sequence[Measured]) -> tuple[Fit, float]:
    """Return coefficients (fixed, sequence, token of context, experts), and the share that a token hits."""
    fits = [(fit(points, _decode_terms(share)), share) for share in EXPERT_SHARES]
    best = min(fits, key=lambda item: item[0].mean_error)
    return best if best[0].mean_error < CLEARLY * fits[0][0].mean_error else fits[0]


def with_steps(profile: Profile, prefill: Sequence[Measured], steps: Sequence[MeasuredStep]) -> Profile:
    """Return `profile` with what steps take that compute prompts, alone or beside sequences that decode.

    Args:
        profile: It has the lengths that steps are padded to, and what decode takes.
        prefill: Prompts, at least one, that were each computed in one step, whose prefix was where attention
            reads it.
        steps: Those with a chunk.
    """
    if not steps:
        return profile
    prompts = [MeasuredStep(round(item.tokens), item.context, 0, 0.0, item.seconds) for item in prefill]
    by_rows = [dataclasses.replace(profile, attention_rows=rows) for rows in ATTENTION_ROWS]
    errors, profile = min(
        ((_left_out_errors(each, [*prompts, *steps]), each) for each in by_rows),
        key=lambda item: statistics.fmean(item[0]),
    )
    profile = _with_prompt_costs(_with_step_costs(profile, [*prompts, *steps]), prefill)
    cost, known = CostModel(profile), profile.evidence
    evidence = dataclasses.replace(
        known,
        prefill=_points(prefill, cost.prefill_s),
        steps=tuple(_step_point(item, cost) for item in steps),
        prefill_left_out_error=statistics.fmean(errors[: len(prompts)]),
        steps_left_out_error=statistics.fmean(errors[len(prompts) :]),
        worst_left_out_error=max(known.worst_left_out_error, *errors),
    )
    return dataclasses.replace(profile, evidence=evidence)


def _step_point(step: MeasuredStep, cost: CostModel) -> StepPoint:
    known = step.tokens, step.prefix, step.batch, step.context, step.seconds
    return StepPoint(*known, step.predicted_s(cost))


def _left_out_errors(profile: Profile, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the relative error at each step of a fit to all the others."""
    errors = []
    for index, step in enumerate(steps):
        others = _with_step_costs(profile, [*steps[:index], *steps[index + 1 :]])
        errors.append(abs(step.predicted_s(CostModel(others)) / step.seconds - 1))
    return errors


def _with_step_costs(profile: Profile, steps: Sequence[MeasuredStep]) -> Profile:
    # Attention takes a second for each token, to see how many there are.
    ones = dataclasses.replace(profile, prefill_token2_s=1.0, chunk_token2_s=1.0, chunk_step_s=1.0)
    cost = CostModel(ones)
    seconds = np.array([step.seconds for step in steps])
    # Between relative and absolute errors: a prompt of 200 ms is queued for as long as forty of 5 ms.
    weights = np.sqrt(seconds)
    known = np.array([profile.decode_context_token_s * step.batch * step.context for step in steps])
    matrix = np.array([_unknown(step, cost) for step in steps]) / weights[:, None]
    found = least_squares(matrix, (seconds - known) / weights)
    step_s, token_s, token2_s, short_token2_s, mixed_s, sequence_s = found
    return dataclasses.replace(
        profile,
        chunk_step_s=max(LEAST_S, step_s),
        prefill_token_s=max(LEAST_S, token_s),
        prefill_token2_s=token2_s,
        chunk_token2_s=short_token2_s,
        mixed_step_s=mixed_s,
        chunk_sequence_s=sequence_s,
    )


def _unknown(step: MeasuredStep, cost: CostModel) -> list[float]:
    """Return what each cost of a step with a chunk is multiplied with."""
    rows = step.tokens + step.batch
    attended = step.attended * cost.step.attention_s(step.tokens, rows)
    squares = (0.0, attended) if rows < cost.profile.long_chunk_tokens else (attended, 0.0)
    return [1.0, cost.step.padded_rows(rows), *squares, float(step.batch > 0), step.batch]


def _with_prompt_costs(profile: Profile, prefill: Sequence[Measured]) -> Profile:
    """Return `profile` with what prompts take beside their tokens and attention, in closed form."""
    known = CostModel(dataclasses.replace(profile, prefill_fixed_s=0.0, prefill_small_s=0.0))
    seconds = np.array([item.seconds for item in prefill])
    wanted = 1 - np.array([known.prefill_s(item.tokens, item.context) for item in prefill]) / seconds

    def beside(small: int) -> tuple[float, tuple[float, ...]]:
        terms = [[1.0, small / (item.tokens + small) if small else 0.0] for item in prefill]
        matrix = np.array(terms) / seconds[:, None]
        found = least_squares(matrix, wanted)
        return float(((matrix @ np.array(found) - wanted) ** 2).sum()), found

    (_, (fixed_s, small_s)), small = min((beside(small), small) for small in SMALL_TOKENS)
    return dataclasses.replace(
        profile, prefill_fixed_s=fixed_s, prefill_small_s=small_s, prefill_small_tokens=small
    )


def fitted(
    make: Callable[..., Profile],
    prefill: Sequence[Measured],
    decode: Sequence[Measured],
    evidence: Evidence,
) -> Profile:
    """Return the profile that fits the points best, with each point beside what it predicts.

    Args:
        make: Makes a profile of the fitted coefficients, by name, and what it knows itself.
        prefill: Points whose prefix was where attention reads it.
        decode: Points of steps.
        evidence: What is known of the points' origin.
    """
    prefill_fit, small_tokens = fit_prefill(prefill)
    decode_fit, expert_share = fit_decode(decode)
    fixed_s, token_s, token2_s, small_s = prefill_fit.coefficients
    step_s, sequence_s, context_s, experts_s = decode_fit.coefficients
    profile = make(
        prefill_fixed_s=fixed_s,
        prefill_token_s=max(LEAST_S, token_s),
        prefill_token2_s=token2_s,
        prefill_small_s=small_s,
        prefill_small_tokens=small_tokens,
        prefix_token_s=0.0,
        decode_fixed_s=max(LEAST_S, step_s),
        decode_sequence_s=sequence_s,
        decode_context_token_s=context_s,
        decode_experts_s=experts_s,
        expert_share=expert_share,
    )
    cost = CostModel(profile)
    evidence = dataclasses.replace(
        evidence,
        prefill=_points(prefill, cost.prefill_s),
        decode=_points(decode, lambda batch, context: cost.decode_step_s(batch, batch * context)),
        prefill_left_out_error=prefill_fit.mean_error,
        decode_left_out_error=decode_fit.mean_error,
        worst_left_out_error=max(*prefill_fit.left_out_errors, *decode_fit.left_out_errors),
    )
    return dataclasses.replace(profile, evidence=evidence)


def _points(measured: Sequence[Measured], predict: Callable[[float, float], float]) -> tuple[Point, ...]:
    return tuple(
        Point(item.tokens, item.context, item.seconds, predict(item.tokens, item.context))
        for item in measured
    )


def _prefill_terms(small: int) -> Terms:
    return lambda new, prefix: [
        1.0,
        new,
        new * (new + 2.0 * prefix),
        small / (new + small) if small else 0.0,
    ]


def _decode_terms(expert_share: float) -> Terms:
    return lambda batch, context: [1.0, batch, batch * context, hit_share(expert_share, batch)]


def _predicted(coefficients: Sequence[float], point: Measured, terms: Terms) -> float:
    return sum(
        factor * term for factor, term in zip(coefficients, terms(point.tokens, point.context), strict=True)
    )


def _solve(points: Sequence[Measured], terms: Terms) -> tuple[float, ...]:
    seconds = np.array([point.seconds for point in points])
    matrix = np.array([terms(point.tokens, point.context) for point in points]) / seconds[:, None]
    return least_squares(matrix, np.ones(len(points)))


def least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the coefficients of the least error, none of them under 0."""
    width = matrix.shape[1]
    best, least = np.zeros(width), float("inf")
    for count in range(1, width + 1):
        for columns in itertools.combinations(range(width), count):
            part = matrix[:, columns]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(((part @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(width), error
                best[list(columns)] = found
    return tuple(best.tolist())
