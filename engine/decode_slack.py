"""How long the sequences that decode can wait for a step, from what each has had of its bounds.

`base/step_budget.py` says what is due when, and what a step may take by it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf
from typing import NamedTuple

from base.step_budget import KEPT_MEAN, DecodeLoad, is_lost, longest_left_s
from base.step_cost import StepCorrection, StepCost, attended_by
from engine.sequence import Sequence
from engine.step import StepEntry, StepPlan


class Decoding(NamedTuple):
    """A sequence that decodes in a step, as it is when that begins."""

    sequence: Sequence
    context_tokens: int
    first_token_at_s: float | None
    """Moment of the first; None: it has none, and no bound of its own says when the next is due."""
    last_token_at_s: float
    num_gaps: int
    """Tokens that it has had since the first."""
    gaps_left: int


def decodes_now(sequence: Sequence) -> Decoding:
    """Return what decodes in a step that begins now."""
    return Decoding(
        sequence,
        sequence.num_tokens - 1,
        sequence.first_token_at_s,
        sequence.last_token_at_s,
        sequence.num_gaps,
        sequence.stop.max_tokens - sequence.num_generated_tokens,
    )


def decodes_after(entry: StepEntry, now_s: float) -> Decoding:
    """Return what decodes in a step that begins at `now_s`, when the one that samples the token before has
    ended."""
    sequence = entry.sequence
    first_s, num_gaps = sequence.first_token_at_s, sequence.num_gaps + 1
    if first_s is None:
        first_s, num_gaps = now_s, 0
    gaps_left = sequence.stop.max_tokens - (entry.start + 1 - sequence.num_prompt_tokens)
    return Decoding(sequence, entry.start, first_s, now_s, num_gaps, gaps_left)


def decode_load(
    decoding: Collection[Decoding], cost: StepCost, correction: StepCorrection, now_s: float
) -> DecodeLoad:
    """Return what a step that begins at `now_s` decodes; notes whose bound turns out to be lost."""
    if not decoding:
        return DecodeLoad()
    context_tokens = sum(row.context_tokens for row in decoding)
    empty_s = cost.decode_step_s(len(decoding), context_tokens) * correction.ratio(False)
    begun = [row for row in decoding if row.first_token_at_s is not None]
    mean_left_s, first = _first_due(begun, empty_s, now_s)
    longest_s = min((_longest_s(row, empty_s, now_s) for row in begun), default=inf)
    saving_s = 0.0 if first is None else KEPT_MEAN * first.sequence.gap_bounds.mean_s - empty_s
    return DecodeLoad(len(decoding), context_tokens, mean_left_s, longest_s, saving_s)


def predicted_step_s(plan: StepPlan, cost: StepCost) -> float:
    """Return the seconds that the profile says to a step."""
    singles, chunks = plan.entries[: plan.num_single], plan.entries[plan.num_single :]
    context_tokens = sum(entry.start for entry in singles)
    if not chunks:
        return cost.decode_step_s(len(singles), context_tokens)
    attended = sum(attended_by(entry.num_tokens, entry.start) for entry in chunks)
    num_tokens = sum(entry.num_tokens for entry in chunks)
    return cost.with_chunks_s(num_tokens, attended, len(singles), context_tokens)


def _first_due(begun: Iterable[Decoding], empty_s: float, now_s: float) -> tuple[float, Decoding | None]:
    """Return the seconds until the first token is due by a bound on the mean gap, and whose it is."""
    bound = [row for row in begun if row.sequence.gap_bounds.mean_s != inf and not row.sequence.is_mean_lost]
    while bound:
        first = min(bound, key=_due_s)
        left_s = _due_s(first) - now_s
        if not is_lost(left_s, max(1, first.gaps_left), first.sequence.gap_bounds.mean_s, empty_s):
            return left_s, first
        first.sequence.is_mean_lost = True
        bound.remove(first)
    return inf, None


def _due_s(row: Decoding) -> float:
    assert row.first_token_at_s is not None
    return row.first_token_at_s + KEPT_MEAN * row.sequence.gap_bounds.mean_s * (row.num_gaps + 1)


def _longest_s(row: Decoding, empty_s: float, now_s: float) -> float:
    sequence = row.sequence
    return longest_left_s(sequence.gap_bounds, sequence.is_mean_lost, row.last_token_at_s, empty_s, now_s)
